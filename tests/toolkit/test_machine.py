"""What is read of the machine: fake trees of files, as the kernel and the drivers show them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from shoal_toolkit.job import machine
from shoal_toolkit.job.devices import Nic, count_gpus, read_nics

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth1\t0007630A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def tree(root: Path, files: Mapping[str, str]) -> str:
    """Make files of these texts below a root; returns it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


# GPUs


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("1,0", 2),
        (" 1 , 0 ", 2),
        ("0,-1,1", 1),
        ("7", 0),
        ("0,0", 0),
        ("GPU-ab", 1),
        ("GPU-ab,GPU-cd", 2),
        ("GPU-ab,1", 1),
        ("0,GPU-ab", 1),
        ("MIG-ab", 1),
        ("MIG-ab,MIG-cd", 1),
        ("MIG-GPU-ab/1/0", 1),
    ],
)
def test_gpus_are_the_device_nodes_that_cuda_would_show(tmp_path: Path, visible: str | None, count: int) -> None:
    """Defect 22: the stock toolkit counts what nvidia-smi lists."""
    devices = ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(str(tmp_path), devices, environ) == count


@pytest.mark.parametrize(("word", "count"), [("all", 1), ("0", 1), ("none", 0), ("void", 0)])
def test_a_container_without_gpus(tmp_path: Path, word: str, count: int) -> None:
    assert count_gpus(str(tmp_path), ["nvidia0"], {"NVIDIA_VISIBLE_DEVICES": word}) == count


def test_without_device_nodes_there_are_no_gpus(tmp_path: Path) -> None:
    assert count_gpus(str(tmp_path), ["null"], {"CUDA_VISIBLE_DEVICES": "0"}) == 0


def mig(gpu: int, *minors: int) -> dict[str, str]:
    """GPU instances with a compute instance each, as the driver lists them."""
    directory = f"proc/driver/nvidia/capabilities/gpu{gpu}/mig"
    files = {}
    for number, minor in enumerate(minors, start=1):
        text = "DeviceFileMinor: {}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
        files[f"{directory}/gi{number}/access"] = text.format(minor - 1)
        files[f"{directory}/gi{number}/ci0/access"] = text.format(minor)
    return files


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        ({**mig(0, 13), "dev/nvidia-caps/nvidia-cap13": ""}, None, 2),
        ({**mig(0, 13, 22), "dev/nvidia-caps/nvidia-cap22": ""}, None, 2),
        (mig(0, 13), None, 1),
        ({**mig(0, 13), **mig(1, 40), "dev/nvidia-caps/nvidia-cap13": "", "dev/nvidia-caps/nvidia-cap40": ""}, None, 1),
        ({**mig(0, 13), "dev/nvidia-caps/nvidia-cap13": ""}, "0", 1),
        ({"proc/driver/nvidia/capabilities/mig/config": "DeviceFileMinor: 1\n"}, None, 2),
    ],
    ids=["one cut, one whole", "one instance of two", "none given", "both cut", "chosen", "not cut"],
)
def test_gpus_cut_into_mig_instances_count_once(
    tmp_path: Path, files: dict[str, str], visible: str | None, count: int
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(tree(tmp_path, files), ["nvidia0", "nvidia1"], environ) == count


# CPUs

V2 = "0::{}\n"
V1 = "9:name=systemd:/x\n4:memory:/x\n3:cpuset:/\n2:cpu,cpuacct:{}\n"


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("50000 100000", 0.5), ("250000 100000", 2.5)])
def test_the_cgroups_quota(tmp_path: Path, text: str, quota: float | None) -> None:
    """Defect 22: the stock toolkit ignores it."""
    root = tree(tmp_path, {"proc/self/cgroup": V2.format("/"), "sys/fs/cgroup/cpu.max": text})
    assert machine.read_cpu_quota(root) == quota


@pytest.mark.parametrize(
    ("path", "limits", "quota"),
    [
        ("/pod/box", {"pod/box": "200000 100000"}, 2),
        ("/pod/box", {"pod": "100000 100000", "pod/box": "200000 100000"}, 1),
        ("/pod/box", {"pod": "400000 100000", "pod/box": "max 100000"}, 4),
        ("/of/the/host", {".": "300000 100000"}, 3),
        ("/pod", {"other": "100000 100000"}, None),
    ],
    ids=["its own", "a tighter one above", "only above", "a container's mount", "another's"],
)
def test_the_quotas_of_nested_cgroups(tmp_path: Path, path: str, limits: dict[str, str], quota: float | None) -> None:
    files = {f"sys/fs/cgroup/{name}/cpu.max": f"{text}\n" for name, text in limits.items()}
    assert machine.read_cpu_quota(tree(tmp_path, {"proc/self/cgroup": V2.format(path), **files})) == quota


def test_the_quotas_of_cgroups_version_1(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": V1.format("/docker/ab"), "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    root = tree(tmp_path, {**files, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"})
    assert machine.read_cpu_quota(root) is None
    tree(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n"})
    assert machine.read_cpu_quota(root) == 1
    inner = "sys/fs/cgroup/cpu/docker/ab"
    tree(tmp_path, {f"{inner}/cpu.cfs_quota_us": "50000\n", f"{inner}/cpu.cfs_period_us": "100000\n"})
    assert machine.read_cpu_quota(root) == 0.5


def test_part_of_a_cpu_counts_as_one(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": V2.format("/"), "sys/fs/cgroup/cpu.max": "20000 100000"})
    assert machine.count_cpus({}, root) == 1
    assert machine.count_cpus({}, str(tmp_path / "none")) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("own", "expected"), [("1", 1), ("3", 3), ("100", 4), ("0", 1), ("many", 4)])
def test_the_users_own_number_of_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    found = machine.read_machine({"PATH": "", "SHOAL_CPUS": own}, "eth0", [], root=str(tmp_path))
    assert (found.cpus, found.has_fewer_cpus) == (expected, expected < 4)


# Network


def card(root: Path, name: str, driver: str, device: str, verbs: str) -> None:
    path = tree(root, {f"sys/class/infiniband/{name}/device/device": f"{device}\n"})
    directory = Path(path) / "sys/class/infiniband" / name / "device"
    (directory / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    (directory / "infiniband_verbs" / verbs).mkdir(parents=True)


def test_a_network_card_is_usable_with_its_device_node(tmp_path: Path) -> None:
    card(tmp_path, "rdmap16s27", "efa", "0xefa1", "uverbs0")
    card(tmp_path, "mlx5_0", "mlx5_core", "0x101b", "uverbs1")
    tree(tmp_path, {"dev/infiniband/uverbs0": ""})
    assert read_nics(str(tmp_path)) == (
        Nic("mlx5_0", "mlx5_core", "0x101b", usable=False),
        Nic("rdmap16s27", "efa", "0xefa1", usable=True),
    )
    assert read_nics(str(tmp_path / "none")) == ()


@pytest.mark.parametrize(
    ("address", "interface"), [("10.99.7.2", "eth1"), ("172.17.3.4", "eth0"), ("8.8.8.8", "eth0"), ("0.0.0.0", "eth0")]
)
def test_the_interface_that_routes_to_a_peer(address: str, interface: str) -> None:
    assert machine.find_route_interface(ROUTES, address) == interface


def test_no_route_at_all() -> None:
    assert machine.find_route_interface(ROUTES.splitlines()[0], "10.0.0.1") == ""


def interfaces(root: Path, routes: str, **states: str) -> str:
    return tree(
        root,
        {
            "proc/net/route": routes,
            **{f"sys/class/net/{name}/operstate": f"{state}\n" for name, state in states.items()},
        },
    )


def test_an_interface_that_is_there_is_taken(tmp_path: Path) -> None:
    root = interfaces(tmp_path, ROUTES, lo="unknown", eth1="up")
    chosen, why, replaced = machine.choose_interface("eth1", [], root)
    assert (chosen, replaced) == ("eth1", False)
    assert why == "interface eth1: network_interface_name (default eth0) names it, and it exists"


@pytest.mark.parametrize(
    ("routes", "states", "chosen", "reason"),
    [
        (ROUTES, {"eth0": "up", "eth1": "up"}, "eth0", "the route to the other hosts, or to the network, goes over it"),
        ("", {"eth0": "down", "eth1": "up"}, "eth1", "it is the first that is up"),
        ("", {"tunl0": "down"}, "lo", "it is the first that is up"),
    ],
)
def test_a_missing_network_interface_is_replaced_with_a_reason(
    tmp_path: Path, routes: str, states: dict[str, str], chosen: str, reason: str
) -> None:
    found, why, replaced = machine.choose_interface("ethwe", [], interfaces(tmp_path, routes, lo="unknown", **states))
    assert (found, replaced) == (chosen, True)
    there = ", ".join(sorted({"lo", *states}))
    assert why == (
        f"network_interface_name is 'ethwe', which is not an interface here ({there}): using {chosen!r}: {reason}"
    )


def test_one_peer_that_is_known_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each name that is not known yet may take a name server's time limit."""
    asked: list[str] = []

    def resolve(peer: str) -> str:
        asked.append(peer)
        return "" if peer == "algo-2" else "10.99.7.2"

    monkeypatch.setattr(machine, "_resolve_host", resolve)
    root = interfaces(tmp_path, ROUTES, eth0="up", eth1="up")
    assert machine.choose_interface("ethwe", ["algo-2", "algo-3", "algo-4"], root)[0] == "eth1"
    assert asked == ["algo-2", "algo-3"]


# Programs


def programs(directory: Path, *names: str) -> str:
    directory.mkdir(parents=True)
    for name in names:
        (directory / name).touch(0o755)
    return str(directory / names[0])


@pytest.mark.parametrize(
    ("beside", "series"), [(["orterun", "orted"], 4), (["prterun", "prted"], 5), (["prted"], 5), (["mpiexec.hydra"], 0)]
)
def test_the_series_of_open_mpi_is_read_from_files_beside_mpirun(
    tmp_path: Path, beside: list[str], series: int
) -> None:
    mpirun = programs(tmp_path / "bin", "mpirun", *beside)
    assert machine.find_open_mpi_series(mpirun, {"PATH": str(tmp_path / "nothing")}) == series


def test_a_link_to_mpirun_is_followed(tmp_path: Path) -> None:
    mpirun = programs(tmp_path / "opt/bin", "mpirun", "prted")
    link = tmp_path / "bin" / "mpirun"
    link.parent.mkdir()
    link.symlink_to(mpirun)
    assert machine.find_open_mpi_series(str(link), {"PATH": str(tmp_path / "nothing")}) == 5


def test_an_mpirun_of_another_mpi(tmp_path: Path) -> None:
    other = programs(tmp_path / "bin", "mpirun.mpich", "mpiexec.hydra", "orted")
    (tmp_path / "bin/mpirun").symlink_to(other)
    assert machine.find_open_mpi_series(str(tmp_path / "bin/mpirun"), {"PATH": str(tmp_path / "bin")}) == 0


def test_a_wrapper_of_mpirun_is_that_of_the_daemon_on_path(tmp_path: Path) -> None:
    wrapper = programs(tmp_path / "own", "mpirun")
    programs(tmp_path / "bin", "orted")
    assert machine.find_open_mpi_series(wrapper, {"PATH": f"{tmp_path}/own:{tmp_path}/bin"}) == 4


# All of it


def test_gpus_interface_and_mpirun_of_a_machine_are_found(tmp_path: Path) -> None:
    root = interfaces(tmp_path, ROUTES, lo="unknown", eth0="up")
    card(tmp_path, "efa_0", "efa", "0xefa2", "uverbs0")
    tree(tmp_path, {f"dev/{name}": "" for name in ("nvidia0", "neuron0", "neuron1", "neuron", "infiniband/uverbs0")})
    mpirun = programs(tmp_path / "bin", "mpirun", "prterun")
    found = machine.read_machine({"PATH": str(tmp_path / "bin")}, "eth0", [], root=root)
    assert (found.gpus, found.neuron_devices, found.interface, found.mpirun, found.open_mpi) == (
        *(1, 2, "eth0", mpirun, 5),
    )
    assert [nic.name for nic in found.nics] == ["efa_0"]
    assert found.cpus >= 1


def test_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python3"))
    found = machine.read_machine({"PATH": str(tmp_path)}, "eth0", [], root=str(tmp_path))
    assert (found.gpus, found.mpirun, found.open_mpi, found.nics) == (0, "", 0, ())
