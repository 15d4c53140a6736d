"""Models of a Hub on machines without a shared cache: each machine downloads once, or no file at all."""

import json
import sys
import time

import pytest

from tests.features.machines.distributed.test_machines import trained
from tests.support.hub import stored_weights, weight_bytes
from tests.support.machines import Bed, needs_machines, wait

pytestmark = [pytest.mark.slow, needs_machines]
NAME = "org/model"


@pytest.mark.parametrize("streams", [False, True], ids=["downloaded", "streamed"])
def test_a_model_of_the_hub(cases, tmp_path, streams) -> None:
    """Two machines with one and two ranks; the Hub is on a third."""
    case = cases(9, 3)
    with Bed(tmp_path, 3) as bed:
        stop, log = tmp_path / "stop", tmp_path / "hub.log"
        server = f"{sys.executable} -m tests.support.hub_server --host {bed.machines[2].address} --other-name m2"
        serve = f"(until [ -e {stop} ]; do sleep 0.2; done) | {server} --folder {case.folder} --repository {NAME}"
        hub, _ = bed.machines[2].start(["sh", "-c", serve], log)
        while not (endpoint := log.read_text().strip()):
            assert hub.poll() is None
            time.sleep(0.1)
        exported = {"HF_ENDPOINT": endpoint, "HF_HOME": f"{bed.disk}/cache"}
        load = {"load": {"tp_stream": True} if streams else {}}
        trained(bed, [1, 2, 0], case, load, NAME, environments={0: exported, 1: exported})
        stop.touch()
        said = json.loads(wait(hub, log, 30).output.splitlines()[-1])
        stored = [len(stored_weights(machine.folder / "cache")) for machine in bed.machines[:2]]
    if streams:
        assert stored == [0, 0]
        assert said["weight_bytes"] < 1.5 * weight_bytes(case.folder)  # headers and replicated tensors, for each rank
    else:
        assert min(stored) > 0
        assert said["weight_bytes"] == 2 * weight_bytes(case.folder)
