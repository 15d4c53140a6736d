"""Links in a folder whose new files are uploaded, and options of an upload."""

import pytest

from tests.support.saving import made
from tp_transformers.features.hub_streaming import push
from tp_transformers.ranks.group import GROUP


def test_a_link_that_leads_nowhere_is_no_hindrance_to_an_upload(tmp_path, monkeypatch) -> None:
    saved = made(tmp_path / "saved", 1)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes").symlink_to(tmp_path / "none")
    (folder / "config.json").symlink_to(tmp_path / "none")
    uploaded: list[str] = []
    monkeypatch.setattr(
        push._Saved, "push_to_hub", lambda self, **options: uploaded.extend(path.name for path in self.files)
    )
    push.save_and_push(GROUP.of(saved.model), saved.model.save_pretrained, folder)
    assert sorted(uploaded) == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_option_that_a_save_ignores_is_an_error_as_in_transformers(tmp_path, monkeypatch) -> None:
    group = GROUP.of(made(tmp_path / "saved", 1).model)
    monkeypatch.setattr(push._Saved, "push_to_hub", lambda self, **options: None)
    with pytest.raises(TypeError, match="privat"):
        push.push(group, lambda folder, **options: None, "org/name", privat=True)  # as PEFT's save
