"""The files of docs/deploying.md do what the page says: batch scripts, manifests, the Dockerfile.

There is no cluster here. A stand-in for ``srun`` starts tasks as Slurm does, and pods are processes on this
machine with the variables that their controllers set.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import yaml
from checkpoints import save_causal
from distributed import run_processes
from habits import words
from places import ROOT
from ports import free_port
from s3_server import BUCKET, s3_store
from shardconv_runtime.files.small_files import CACHE_VARIABLE

import shardconv

DEPLOY = ROOT / "examples" / "deploy"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
SCRIPTS = sorted(DEPLOY.glob("*.sbatch"))
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
TOKENS = [list(range(3, 9))]

SRUN = """#!/bin/bash
# Starts what Slurm's srun would start, all on this host.
while [[ $1 == -* ]]; do shift; done
export SLURM_NTASKS=$((SLURM_NNODES * TASKS)) SLURM_STEP_TASKS_PER_NODE="$TASKS(x$SLURM_NNODES)"
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_NODEID=$((task / TASKS)) SLURM_LOCALID=$((task % TASKS)) "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames 127.0.0.[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""
SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
file = os.path.join(os.environ["RESULTS"], os.environ.get("RANK") or os.environ["SLURM_PROCID"])
with open(file, "w") as shown:
    json.dump([sys.argv[1:], {name: os.environ.get(name) for name in names}], shown)
"""
GENERATE = f"""
import json, os, sys
import shardconv_runtime, torch
model = shardconv_runtime.load(sys.argv[-1], device="cpu")
found = model.generate(torch.tensor({TOKENS}), max_new_tokens=4, min_new_tokens=4, do_sample=False)
place = {{name: os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")}}
with open(os.path.join(os.environ["RESULTS"], os.environ["RANK"]), "w") as file:
    json.dump([found.tolist(), place], file)
"""


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def containers(value: Any) -> Iterator[dict[str, Any]]:
    """All of a manifest, in order."""
    if isinstance(value, dict):
        yield from value.get("containers", [])
        for inner in value.values():
            yield from containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from containers(inner)


def environment(tmp_path: Path, **given: object) -> dict[str, str]:
    """Of a job on this host; programs write to ``results``."""
    bins, results = tmp_path / "bin", tmp_path / "results"
    results.mkdir(exist_ok=True)
    bins.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (bins / name).write_text(text)
        (bins / name).chmod(0o755)
    paths = [str(bins), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]),
        "RESULTS": str(results),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in given.items()},
    }


def slurm(tmp_path: Path, nodes: int, tasks: int, **given: object) -> dict[str, str]:
    """Of a batch script; the port is a free one."""
    job = free_port() - 20000
    while not 0 < job < 20000:
        job = free_port() - 20000
    names = {"SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_NNODES": nodes, "SLURM_JOB_ID": job}
    return environment(tmp_path, **names, TASKS=tasks, **given)


def submit(script: str, arguments: list[str | Path], env: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", DEPLOY / script, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def start_pod(container: Mapping[str, Any], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process with the command of a container, whose variables ``env`` replaces."""
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return subprocess.Popen(
        [*container["command"], *container["args"]],
        env={**own, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(pods: list[subprocess.Popen[str]]) -> None:
    outputs = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * len(pods), "\n".join(outputs)


def results(tmp_path: Path) -> dict[int, Any]:
    """Of each process, what it wrote."""
    return {int(file.name): json.loads(file.read_text()) for file in (tmp_path / "results").iterdir()}


# What takes no time ------------------------------------------------------------------------------------


def test_the_page_names_each_file() -> None:
    for file in (*SCRIPTS, *MANIFESTS, DEPLOY / "Dockerfile"):
        assert f"(../examples/deploy/{file.name})" in PAGE


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_batch_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text().startswith("#!/bin/bash\n#SBATCH "), (
        "Slurm reads options before the first command"
    )


def test_the_page_shows_what_the_script_exports() -> None:
    lines = [line.strip() for line in (DEPLOY / "srun.sbatch").read_text().splitlines()]
    exported = [line for line in lines if line.startswith("export ") and "RANK" in line]
    assert len(exported) == 2
    assert "\n".join(exported) in PAGE


def test_srun_gives_each_task_the_variables_that_torch_reads(tmp_path: Path) -> None:
    show = tmp_path / "show.py"
    show.write_text(SHOW)
    env = slurm(tmp_path, nodes=2, tasks=2)
    submit("srun.sbatch", [show, "--model", "a b"], env)
    port = str(20000 + int(env["SLURM_JOB_ID"]) % 20000)
    common = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    found = results(tmp_path)
    assert len(found) == 4
    for rank, (arguments, variables) in found.items():
        assert arguments == ["--model", "a b"]
        assert variables == {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), **common}


@pytest.mark.parametrize("ranks", [None, 4])
def test_torchrun_is_told_which_host_it_is_on(tmp_path: Path, ranks: int | None) -> None:
    env = slurm(tmp_path, nodes=2, tasks=1, **({} if ranks is None else {"RANKS_PER_HOST": ranks}))
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(f"#!{sys.executable}{SHOW}")
    torchrun.chmod(0o755)
    submit("torchrun.sbatch", ["-m", "program", "a b"], env)
    port = str(20000 + int(env["SLURM_JOB_ID"]) % 20000)
    found = results(tmp_path)
    assert len(found) == 2
    for node, (arguments, _) in found.items():
        assert arguments == [
            *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks or "gpu")),
            *("--master-addr", "127.0.0.1", "--master-port", port, "-m", "program", "a b"),
        ]


def test_a_task_that_fails_fails_the_job(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import os, sys; sys.exit(os.environ['RANK'] == '1')")
    done = subprocess.run(["bash", DEPLOY / "srun.sbatch", script], env=slurm(tmp_path, nodes=1, tasks=2))
    assert done.returncode == 1


FIELDS = {
    "Deployment": {"replicas", "selector", "template"},
    "Job": {"backoffLimitPerIndex", "completionMode", "completions", "parallelism", "template"},
    "JobSet": {"failurePolicy", "network", "replicatedJobs"},
    "LeaderWorkerSet": {"leaderWorkerTemplate", "replicas"},
    "PersistentVolumeClaim": {"accessModes", "resources"},
    "Service": {"ports", "selector"},
    "container": {
        "args", "command", "env", "image", "name", "ports", "readinessProbe", "resources", "volumeMounts",
    },
    "pod": {"containers", "restartPolicy", "serviceAccountName", "volumes"},
}  # fmt: skip
"""Fields of Kubernetes, JobSet (v1alpha2) and LeaderWorkerSet (v1) that the manifests use. Others may be
misspelled: look them up in the schemas of the projects before you add them."""


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """The specifications of all pods of a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifests_have_fields_that_exist(manifest: Path) -> None:
    for document in documents(manifest):
        assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert document["spec"].keys() <= FIELDS[document["kind"]]
        for pod in pods(document):
            assert pod.keys() <= FIELDS["pod"]
            volumes = {each["name"] for each in pod.get("volumes", ())}
            for container in pod["containers"]:
                assert container.keys() <= FIELDS["container"]
                assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
                assert all(isinstance(each.get("value", ""), str) for each in container["env"])


def test_leader_and_workers_run_the_same() -> None:
    leader, worker = containers(documents(DEPLOY / "serve.yaml"))
    for name in ("image", "command", "args", "env", "resources", "volumeMounts"):
        assert leader[name] == worker[name]
    workload, service = documents(DEPLOY / "serve.yaml")
    labels = workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == leader["ports"][0]["containerPort"]


def test_the_first_host_of_training_has_the_name_that_jobset_gives_it() -> None:
    (job,) = documents(DEPLOY / "train.yaml")
    (container,) = containers(job)
    name, replicated = job["metadata"]["name"], job["spec"]["replicatedJobs"][0]["name"]
    values = {each["name"]: each["value"] for each in container["env"]}
    assert values["LEADER"] == f"{name}-{replicated}-0-0.{name}"
    hosts = job["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    assert f"--nnodes {hosts} " in container["args"][0]


@pytest.mark.parametrize("manifest", ["convert.yaml", "convert-store.yaml"])
def test_as_many_pods_convert_as_there_are_ranks(manifest: str) -> None:
    job = documents(DEPLOY / manifest)[-1]
    (container,) = containers(job)
    values = {each["name"]: each["value"] for each in container["env"]}
    assert values["TP"] == str(job["spec"]["completions"])


def test_the_image_gets_what_it_copies() -> None:
    """All else is left out of what is sent to the builder."""
    kept = {
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line != "*"
    }
    copied = {path for paths in copies() for path in paths}
    assert copied == kept
    assert all((ROOT / path).exists() for path in copied)


def copies() -> list[list[str]]:
    """The sources of each COPY of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text()
    return [line.split()[:-1] for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)]


# Real processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``plain``, and ``out`` for two ranks."""
    root = tmp_path_factory.mktemp("models")
    words().save_pretrained(save_causal("llama", root / "plain"))
    shardconv.convert(root / "plain", root / "out", tp=2)
    return root


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script that generates on each rank."""
    (tmp_path / "generate.py").write_text(GENERATE)
    return tmp_path / "generate.py"


def sharded_logits(root: Path) -> tuple[list[float], list[str]]:
    """On a rank whose host has no files of other ranks."""
    here = root / f"host-{os.environ['RANK']}"
    with torch.no_grad():
        logits = shardconv_runtime.load(here)(torch.tensor(TOKENS)).logits
    return logits.sum(-1)[0].tolist(), [path.name for path in here.glob("rank-*")]


def test_a_host_needs_the_files_of_its_own_ranks(models: Path, tmp_path: Path) -> None:
    for rank in range(2):
        others = shutil.ignore_patterns(f"rank-{1 - rank:05}-*")
        shutil.copytree(models / "out", tmp_path / f"host-{rank}", ignore=others)
    (first, own), (second, other) = run_processes(2, sharded_logits, tmp_path)
    assert (own, other) == (["rank-00000-of-00002"], ["rank-00001-of-00002"])
    assert first == pytest.approx(second)


def require_tokens(models: Path, tmp_path: Path, hosts: int, ranks: int) -> None:
    """Those of the unsharded model, on every rank."""
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto")
    want = plain.generate(torch.tensor(TOKENS), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    found = results(tmp_path)
    assert sorted(found) == list(range(hosts * ranks))
    for rank, (tokens, place) in found.items():
        assert tokens == want.tolist()
        assert place == {
            "LOCAL_RANK": str(rank % ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "WORLD_SIZE": str(hosts * ranks),
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "tasks"), [("torchrun.sbatch", 1), ("srun.sbatch", 1), ("srun.sbatch", 2)]
)
def test_slurm_starts_ranks(models: Path, program: Path, tmp_path: Path, script: str, tasks: int) -> None:
    hosts = 2 // tasks
    submit(script, [program, models / "out"], slurm(tmp_path, hosts, tasks, RANKS_PER_HOST=1))
    require_tokens(models, tmp_path, hosts, tasks)


@pytest.mark.slow
def test_srun_alone_is_an_error_of_each_task(models: Path, program: Path, tmp_path: Path) -> None:
    command = ["srun", sys.executable, program, models / "out"]
    env = slurm(tmp_path, nodes=1, tasks=2)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("Slurm started 2, but RANK is not set") == 2


@pytest.mark.slow
def test_an_array_of_jobs_converts(models: Path, tmp_path: Path) -> None:
    env = environment(tmp_path)
    jobs = [
        subprocess.Popen(
            ["bash", DEPLOY / "convert.sbatch", models / "plain", "2", tmp_path / "out"],
            env={**env, "SLURM_ARRAY_TASK_ID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    finish(jobs)
    assert directory(tmp_path / "out") == directory(models / "out")


@pytest.mark.slow
def test_pods_convert(models: Path, tmp_path: Path) -> None:
    (container,) = containers(documents(DEPLOY / "convert.yaml"))
    given = environment(tmp_path, MODEL=models / "plain", TP=2, OUT=tmp_path / "out")
    finish([start_pod(container, {**given, "JOB_COMPLETION_INDEX": str(rank)}) for rank in range(2)])
    assert directory(tmp_path / "out") == directory(models / "out")


@pytest.mark.slow
def test_pods_convert_into_a_bucket_and_serve_from_there(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("obstore", "fastapi", "prometheus_client", "uvicorn"):
        pytest.importorskip(package)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with s3_store(monkeypatch) as store:
        model, out = store.upload(models / "plain", "plain"), f"s3://{BUCKET}/out"
        (container,) = containers(documents(DEPLOY / "convert-store.yaml"))
        given = environment(tmp_path, MODEL=model, TP=2, OUT=out)
        finish([start_pod(container, {**given, "JOB_COMPLETION_INDEX": str(rank)}) for rank in range(2)])
        for path, content in directory(models / "out").items():
            assert store.objects[f"out/{path}"] == content
        assert "out/manifest.json" in store.objects
        served = environment(tmp_path, RANKS_PER_HOST=2, OUT=out)
        require_answers("serve-store.yaml", served, f"--cache-dir {tmp_path / 'nvme'}")
    assert len(list((tmp_path / "nvme").rglob("*.safetensors"))) == 3


def directory(out: Path) -> dict[str, bytes]:
    """All files but the manifest, which has times, and the plan: memory is not measured in this process."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "plan.json")
    }


@pytest.mark.slow
def test_pods_train(models: Path, program: Path, tmp_path: Path) -> None:
    """The program is any; here it generates."""
    (container,) = containers(documents(DEPLOY / "train.yaml"))
    port = free_port()
    container["args"] = [container["args"][0].replace("29500", str(port))]
    given = environment(tmp_path, LEADER="127.0.0.1", RANKS_PER_HOST=1, PROGRAM=program, OUT=models / "out")
    finish([start_pod(container, {**given, "JOB_COMPLETION_INDEX": str(host)}) for host in range(2)])
    require_tokens(models, tmp_path, hosts=2, ranks=1)


@pytest.mark.slow
def test_pods_serve(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    pytest.importorskip("uvicorn")
    given = environment(tmp_path, RANKS_PER_HOST=1, OUT=models / "out")
    require_answers("serve.yaml", given | {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1"})


def require_answers(manifest: str, given: Mapping[str, str], more: str = "") -> None:
    """Of the pods of a server, on other ports."""
    port, public = free_port(), free_port()
    running = []
    for index, container in enumerate(containers(documents(DEPLOY / manifest))):
        text = container["args"][0].replace("29500", str(port)).replace("--port 8000", f"--port {public}")
        container["args"] = [f"{text} --num-blocks 4 {more}"]
        variables = {**given, "SHARDCONV_API_KEY": "key", "LWS_WORKER_INDEX": str(index)}
        running.append(start_pod(container, variables))
    try:
        wait_until_ready(f"http://127.0.0.1:{public}/health", running)
        request = urllib.request.Request(
            f"http://127.0.0.1:{public}/v1/completions",
            json.dumps({"model": "out", "prompt": "w3 w4", "max_tokens": 3, "temperature": 0}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer key"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
    finally:
        for pod in running:
            pod.terminate()
        for pod in running:
            pod.communicate(timeout=60)


def wait_until_ready(url: str, running: list[subprocess.Popen[str]]) -> None:
    for _ in range(240):
        assert all(pod.poll() is None for pod in running), [pod.communicate()[0] for pod in running]
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(url)


@pytest.mark.slow  # installs torch and transformers
def test_the_image_installs(models: Path, program: Path, tmp_path: Path) -> None:
    """The commands of the Dockerfile in an empty environment: the runtime, then the converter."""
    venv.create(tmp_path / "venv", with_pip=True)
    bins = tmp_path / "venv" / "bin"
    app = tmp_path / "app"
    app.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {
        "PATH": f"{bins}{os.pathsep}{env['PATH']}",
        "RESULTS": str(tmp_path / "results"),
        "OMP_NUM_THREADS": "1",
    }
    (tmp_path / "results").mkdir()
    stages = (DEPLOY / "Dockerfile").read_text().split("FROM ")[1:]
    assert [stage.splitlines()[0].rpartition(" ")[2] for stage in stages] == ["runtime", "converter"]
    for number, stage in enumerate(stages):
        for line in stage.splitlines():
            word, _, rest = line.partition(" ")
            if word == "COPY":
                *sources, target = rest.split()
                for source in sources:
                    copy(ROOT / source, app / target)
            elif word == "RUN" and rest.startswith("pip "):
                subprocess.run(["bash", "-c", rest], cwd=app, env=env, check=True)
        if number == 0:
            assert not (bins / "shardconv").exists()
            launch = ["torchrun", "--standalone", "--nproc-per-node", "2", program, models / "out"]
            subprocess.run(launch, cwd=tmp_path, env=env, check=True)
            require_tokens(models, tmp_path, hosts=1, ranks=2)
    subprocess.run([bins / "shardconv", "--version"], cwd=tmp_path, env=env, check=True)


def copy(source: Path, target: Path) -> None:
    """As COPY: the contents of a folder, or a file into one."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
