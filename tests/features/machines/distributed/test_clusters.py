"""The examples for clusters, under real daemons of Ray and SLURM, and the commands of manifests as pods run them."""

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.clients import CLIENTS, EXAMPLES, Inputs, difference, outcome
from tests.support.clusters import missing_for_ray, missing_for_slurm, on_ray, on_slurm
from tests.support.comparisons import relative_errors, worst
from tests.support.machines import Bed, Ended, Started, needs_machines, wait

pytestmark = [pytest.mark.slow, needs_machines]
needs_ray = pytest.mark.skipif(bool(missing_for_ray()), reason=missing_for_ray())
needs_slurm = pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm())
PYTHON = shlex.quote(sys.executable)
HOOKS = next(client for client in CLIENTS if client.script == "hooks.py")


@pytest.fixture(scope="module")
def hooks(small_smollm2: Path) -> str:
    """What hooks.py prints in one process."""
    return outcome(HOOKS, Inputs(small_smollm2, Path()), 0)


def printed(ended: Ended, expression: str) -> list[str]:
    """The lines of a script that match an expression, without what a launcher puts before them."""
    assert ended.code == 0, ended.output
    return re.findall(rf"^(?:\x1b\[\d+m\(.*?\)\x1b\[0m )?({expression})$", ended.output, re.MULTILINE)


@needs_ray
def test_ray_actors_answer_as_one_process(small_smollm2, tmp_path) -> None:
    with Bed(tmp_path, 2) as bed:
        ended = on_ray(bed, f"{PYTHON} {EXAMPLES}/ray_actors.py {small_smollm2}", 300)
        answers = printed(ended, "'.*'")
    tokenizer, model = AutoTokenizer.from_pretrained(small_smollm2), AutoModelForCausalLM.from_pretrained(small_smollm2)
    expected = []
    for prompt in ("The sky is", "Grass is"):
        tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
        expected.append(repr(tokenizer.decode(tokens[0], skip_special_tokens=True)))
    assert answers == expected


@needs_ray
def test_ray_train_trains_as_one_process(small_smollm2, tmp_path) -> None:
    folder = tmp_path / "trained"
    with Bed(tmp_path, 2) as bed:
        ended = on_ray(bed, f"{PYTHON} {EXAMPLES}/ray_train.py {small_smollm2} 2 {folder}", 400)
        losses = [float(line.split()[1]) for line in printed(ended, r"loss [\d.]+")]
        assert f"saved {folder}" in ended.output
    tokenizer, model = AutoTokenizer.from_pretrained(small_smollm2), AutoModelForCausalLM.from_pretrained(small_smollm2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    expected = []
    for text in ("The sky is blue.", "Grass is green.", "Snow is white."):
        ids = tokenizer(text, return_tensors="pt").input_ids
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert list(dict.fromkeys(losses)) == pytest.approx(expected, rel=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert worst(relative_errors(trained, model.state_dict()))[1] < 1e-4


@needs_slurm
def test_a_batch_script_of_slurm(small_smollm2, hooks, tmp_path) -> None:
    """One torchrun a node."""
    job = f"sbatch --wait --gpus-per-node=1 --output=job.log {EXAMPLES}/slurm.sh {EXAMPLES}/hooks.py {small_smollm2}"
    with Bed(tmp_path, 2) as bed:
        ended = on_slurm(bed, f"{job}; code=$?; cat job.log; exit $code", 300)
    check(printed(ended, "(?:norms|effects) .*"), hooks)


@needs_slurm
def test_ranks_that_srun_starts(small_smollm2, hooks, tmp_path) -> None:
    """Without torchrun: two ranks on one node and one on the other."""
    script = f"{PYTHON} -m tp_transformers {EXAMPLES}/hooks.py {small_smollm2}"
    meeting = "MASTER_ADDR=m0 MASTER_PORT=29500"
    with Bed(tmp_path, 2) as bed:
        ended = on_slurm(bed, f"{meeting} srun --nodes=2 --ntasks=3 {script}", 300)
    check(printed(ended, "(?:norms|effects) .*"), hooks)


def test_pods_of_a_job(small_smollm2, hooks, tmp_path) -> None:
    """Its pods meet by a name that the second one cannot resolve at first."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name, gpus = job["metadata"]["name"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    with Bed(tmp_path, job["spec"]["completions"]) as bed:
        command = in_a_pod(container["command"], small_smollm2, {f"--nproc-per-node={gpus}": "--nproc-per-node=1"})
        names = f"{bed.machines[0].address} {name}-0.{spec['subdomain']}\n"
        started = [started_on(bed, index, command, {}) for index in range(2)]
        for machine in bed.machines:
            with machine.hosts.open("a") as hosts:
                hosts.write(names)
            time.sleep(3)
        check_all([wait(*each, 200) for each in started], hooks)


def test_pods_of_a_training_operator(small_smollm2, hooks, tmp_path) -> None:
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    with Bed(tmp_path, sum(spec["replicas"] for spec in replicas.values())) as bed:
        started = []
        for rank, spec in enumerate((replicas["Master"], replicas["Worker"])):
            (container,) = spec["template"]["spec"]["containers"]
            assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
            exported = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
            exported |= {"PET_MASTER_ADDR": "m0", "PET_MASTER_PORT": "23456", "RANK": str(rank), "WORLD_SIZE": "2"}
            started.append(started_on(bed, rank, in_a_pod(container["command"], small_smollm2, {}), exported))
        check_all([wait(*each, 200) for each in started], hooks)


def test_nodes_of_skypilot(small_smollm2, hooks, tmp_path) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    with Bed(tmp_path, task["num_nodes"]) as bed:
        script = task["run"].replace("torchrun", f"{PYTHON} -m torch.distributed.run")
        script = script.replace("script.py", f"{EXAMPLES}/hooks.py {small_smollm2}")
        exported = {
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "SKYPILOT_TASK_ID": "sky-7",
            "SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in bed.machines),
        }
        started = [started_on(bed, index, ["sh", "-c", script], exported) for index in range(2)]
        check_all([wait(*each, 200) for each in started], hooks)


def in_a_pod(command: Sequence[str], model: Path, changes: Mapping[str, str]) -> list[str]:
    """The command of a manifest, with one rank a pod and a script in place of its own."""
    assert set(changes) <= set(command)
    named = {"torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    named["script.py"] = [str(EXAMPLES / "hooks.py"), str(model)]
    return [part for each in command for part in named.get(each, [changes.get(each, each)])]


def started_on(bed: Bed, index: int, command: list[str], exported: Mapping[str, str]) -> Started:
    """A command that has been started on a machine."""
    return bed.machines[index].start(command, bed.disk.parent / f"{index}.log", **exported)


def check_all(ended: list[Ended], hooks: str) -> None:
    """Check that all machines have ended without error, and what the first one has printed."""
    assert all(each.code == 0 for each in ended), "\n".join(each.output for each in ended)
    check([line for each in ended for line in printed(each, "(?:norms|effects) .*")], hooks)


def check(lines: list[str], expected: str) -> None:
    """Compare printed numbers with those of one process."""
    assert difference(expected, "\n".join(lines)) <= HOOKS.tolerance
