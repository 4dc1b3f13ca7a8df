"""Manifests for Kubernetes: what they say, against the published schemas; what is refused."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commands import ROOT
from instep.cli.app import app
from instep.launch.kubernetes.yaml import Commented, to_yaml
from published import check

DIGITS = str(ROOT / "examples" / "digits.py")
BASE = ("/workspace/digits.py", "--image", "lab/digits:1", "--volume", "training:/data", "--name", "digits")
KINDS = ("job", "trainjob", "pytorchjob")


def submit(capsys: Any, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        app(args=["submit", "kubernetes", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def manifests(capsys: Any, *words: str) -> dict[str, dict[str, Any]]:
    code, out, err = submit(capsys, *words, "--dry-run")
    assert code == 0, err
    return {document["kind"]: document for document in yaml.safe_load_all(out)}


def pod_of(by_kind: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if "PyTorchJob" in by_kind:
        return by_kind["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    if "TrainingRuntime" in by_kind:
        job = by_kind["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
        return job["spec"]["template"]["spec"]
    return by_kind["Job"]["spec"]["template"]["spec"]


MANY_OPTIONS = [
    *("--nodes", "2:4", "--gpus-per-node", "4", "--cpus", "8", "--memory", "64Gi", "--namespace", "research"),
    *("--set-env", "NCCL_DEBUG=INFO", "--set-env", "ODD=a: b # {c}", "--volume", "sets:/sets", "--grace", "300"),
    *("lr=3e-4", "--epochs", "5", "--precision", "bf16", "--max-restarts", "5", "--run-dir", "/data/here"),
]


class TestAgainstThePublishedSchemas:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("more", [[], MANY_OPTIONS], ids=["plain", "many options"])
    def test_valid(self, capsys: Any, kind: str, more: list[str]) -> None:
        actual = manifests(capsys, *BASE, "--kind", kind, *more)
        assert (
            actual.keys()
            == {
                "job": {"Service", "Job"},
                "trainjob": {"TrainingRuntime", "TrainJob"},
                "pytorchjob": {"PyTorchJob"},
            }[kind]
        )
        for manifest in actual.values():
            check(manifest)

    def test_with_the_file_from_here(self, capsys: Any) -> None:
        actual = manifests(capsys, DIGITS, *BASE[1:], "--task-from-here", "--kind", "job")
        for manifest in actual.values():
            check(manifest)
        assert actual["ConfigMap"]["data"] == {"digits.py": Path(DIGITS).read_text()}
        pod = pod_of(actual)
        mount = next(m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "task")
        assert f"{mount['mountPath']}/digits.py" in pod["containers"][0]["command"]
        assert {"name": "task", "configMap": {"name": actual["ConfigMap"]["metadata"]["name"]}} in pod["volumes"]

    @pytest.mark.parametrize("kind", KINDS)
    def test_broken_on_purpose(self, capsys: Any, kind: str) -> None:
        for breakage in ("typo", "type", "missing"):
            by_kind = manifests(capsys, *BASE, "--kind", kind)
            pod = pod_of(by_kind)
            if breakage == "typo":
                pod["terminationGraceSeconds"] = 3
            elif breakage == "type":
                pod["terminationGracePeriodSeconds"] = "soon"
            else:
                del pod["containers"][0]["name"]
            with pytest.raises(jsonschema.ValidationError):
                for manifest in by_kind.values():
                    check(manifest)


class TestWhatTheySay:
    @pytest.mark.parametrize(
        ("kind", "host"),
        [("job", "digits-0.digits"), ("trainjob", "digits-node-0-0.digits"), ("pytorchjob", "digits-worker-0")],
    )
    def test_the_agents_meet_at_the_first_pod(self, capsys: Any, kind: str, host: str) -> None:
        actual = manifests(capsys, *BASE, "--kind", kind, "--nodes", "2", "--gpus-per-node", "4", "lr=3e-4")
        command = pod_of(actual)["containers"][0]["command"]
        assert command[:4] == ["instep", "train", "/workspace/digits.py", "lr=3e-4"]
        assert command[command.index("--rdzv-endpoint") + 1] == f"{host}:29400"
        assert command[command.index("--nnodes") + 1] == "2"
        assert command[command.index("--nproc-per-node") + 1] == "4"
        assert command[command.index("--run-dir") + 1] == "/data/runs/digits"
        assert pod_of(actual)["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 4}}

    @pytest.mark.parametrize("kind", KINDS)
    def test_shared_memory_and_the_time_to_save(self, capsys: Any, kind: str) -> None:
        pod = pod_of(manifests(capsys, *BASE, "--kind", kind))
        assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert pod["terminationGracePeriodSeconds"] == 120
        assert "64 MB" in submit(capsys, *BASE, "--kind", kind, "--dry-run")[1]  # why it is there, as a comment

    @pytest.mark.parametrize("kind", ["job", "trainjob"])
    def test_which_ends_are_tried_again(self, capsys: Any, kind: str) -> None:
        by_kind = manifests(capsys, *BASE, "--kind", kind, "--nodes", "2")
        job = by_kind["Job"] if kind == "job" else None
        if job is None:
            job = by_kind["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
        rules = job["spec"]["podFailurePolicy"]["rules"]
        codes = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
        assert codes == {1: "FailJob", 2: "FailJob", 143: "Ignore"}  # and 137 counts for backoffLimit
        assert job["spec"]["backoffLimit"] == 6
        names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
        assert names == {job["spec"]["template"]["spec"]["containers"][0]["name"]}

    def test_words_that_kubernetes_would_expand(self, capsys: Any) -> None:
        by_kind = manifests(capsys, *BASE, "--kind", "job", "--nodes", "2", "text=$(HOME) $x", "--set-env", "A=$(B)")
        container = pod_of(by_kind)["containers"][0]
        assert "text=$$(HOME) $$x" in container["command"]
        assert container["env"][0] == {"name": "A", "value": "$$(B)"}
        assert container["command"][-1] == "$(POD_IP)"  # which is meant to be

    def test_one_pod_needs_no_meeting(self, capsys: Any) -> None:
        command = pod_of(manifests(capsys, *BASE, "--kind", "job"))["containers"][0]["command"]
        assert not [word for word in command if word.startswith("--rdzv") or word == "--nnodes"]


class TestRefused:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (BASE[:3], ("no volume for the run directory", "checkpoints would be lost", "--volume CLAIM:/path")),
            ((*BASE, "--run-dir", "/tmp/x"), ("/tmp/x lies on none of the volumes (/data)",)),
            ((*BASE, "--run-dir", "/data/../etc"), ("lies on none of the volumes",)),
            (
                (*BASE, "--name", "Digits_1"),
                ("name='Digits_1' is not a valid name in Kubernetes", "for instance 'digits-1'"),
            ),
            ((*BASE, "--name", "a" * 60), ("has 60 characters",)),
            ((*BASE, "--namespace", "-x"), ("namespace='-x'",)),
            ((*BASE, "--volume", "nonsense"), ("volume='nonsense' is not CLAIM:/path",)),
            ((*BASE, "--volume", "b:/data"), ("/data would be mounted twice",)),
            ((*BASE, "--nodes", "none"), ("nodes='none' is neither a number nor MIN:MAX",)),
            ((*BASE, "--nodes", "4:2"), ("nodes='4:2'",)),
            ((*BASE, "--gpus-per-node", "4", "-n", "3"), ("-n 3 and gpus_per_node=4",)),
            ((*BASE, "--nodes", "40", "-n", "2"), ("batch_size=64 leaves ranks 64..79 of 80",)),
            ((*BASE, "--memory", "much"), ("memory='much' is not a quantity",)),
            ((*BASE, "--set-env", "A"), ("set_env='A' is not NAME=VALUE",)),
            ((*BASE, "lr"), ("'lr' is neither an option nor name=value",)),
            ((*BASE, "--apply"), ("--apply submits and --dry-run does not",)),
            (("digits.py", *BASE[1:]), ("not an absolute path", "/workspace/digits.py", "--task-from-here")),
            (("none.py", *BASE[1:], "--task-from-here"), ("none.py is not a local Python file",)),
        ],
        ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
    )
    def test_input(self, capsys: Any, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
        code, out, err = submit(capsys, *words, "--kind", "job", "--dry-run")
        assert code == 2, err
        assert out == ""
        for part in parts:
            assert part in err, f"{part!r} is not in {err!r}"

    @pytest.mark.parametrize(
        ("text", "size"), [("#" * 245_757 + "\n", "245,761"), ('#"<' * 40_000, "360,002")], ids=["long", "as JSON"]
    )
    def test_a_file_that_is_too_large(self, capsys: Any, tmp_path: Path, text: str, size: str) -> None:
        path = tmp_path / "large.py"
        path.write_text(text)
        code, _, err = submit(capsys, str(path), *BASE[1:], "--task-from-here", "--dry-run", "--kind", "job")
        assert code == 2
        assert f"takes {size} bytes as JSON, and kubectl apply takes at most 245,760" in err

    def test_a_file_that_just_fits(self, capsys: Any, tmp_path: Path) -> None:
        """The annotation in which `kubectl apply` keeps a copy has room for 262,144 bytes."""
        path = tmp_path / "large.py"
        path.write_text("#" * 245_756 + "\n")
        actual = manifests(capsys, str(path), *BASE[1:], "--task-from-here", "--kind", "job")
        assert 245_760 < len(json.dumps(actual["ConfigMap"], ensure_ascii=False).encode()) < 262_144

    @pytest.mark.parametrize("name", ["my task.py", "aufgabe_ä.py", "..py"])
    def test_a_name_that_is_no_key_of_a_config_map(self, capsys: Any, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(Path(DIGITS).read_bytes())
        actual = manifests(capsys, f"{path}:Digits", *BASE[1:], "--task-from-here", "--kind", "job")
        check(actual["ConfigMap"])
        assert actual["ConfigMap"]["data"] == {"task.py": Path(DIGITS).read_text()}
        command = pod_of(actual)["containers"][0]["command"]
        assert command[:3] == ["instep", "train", "/run/instep/task/task.py:Digits"]

    @pytest.mark.parametrize(
        "option", ["--nnodes", "--rdzv-endpoint", "--hosts", "--on", "--preempted-exit", "--fresh", "--quiet"]
    )
    def test_options_that_the_manifests_decide(self, capsys: Any, option: str) -> None:
        code, _, err = submit(capsys, *BASE, option, "1", "--dry-run")
        assert code == 2
        assert f"No such option: {option}" in err

    def test_a_file_that_is_not_python(self, capsys: Any, tmp_path: Path) -> None:
        path = tmp_path / "odd.py"
        path.write_text("def\n")
        code, _, err = submit(capsys, str(path), *BASE[1:], "--task-from-here", "--dry-run", "--kind", "job")
        assert code == 2
        assert "is not a Python file that the pods could load" in err


Submit = Callable[..., tuple[int, str, str]]
KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>"$CALLS"
case "$1" in
api-resources) printf '%s\\n' $KNOWN; exit ${KNOWN_CODE:-0} ;;
apply) test -f "$3" || exit 9; test -z "$REFUSAL" || { echo "$REFUSAL" >&2; exit 1; }; echo "job digits created" ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> dict[str, str]:
    """Stand in for kubectl, which needs a cluster: note how it was called, say what a test wants it to say."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{program.parent}:/bin:/usr/bin", "CALLS": str(tmp_path / "calls"), "KNOWN": "pods"}


@pytest.fixture
def submit_with(tmp_path: Path, monkeypatch: Any, capfd: Any) -> Submit:
    """Return a function that submits from a folder, with variables in the environment."""
    monkeypatch.chdir(tmp_path)

    def submit_in(env: dict[str, str], *words: str) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            return submit(capfd, *BASE, *words)

    return submit_in


class TestKubectl:
    def test_apply(self, submit_with: Submit, tmp_path: Path, kubectl: dict[str, str]) -> None:
        code, out, err = submit_with(kubectl, "--kind", "job", "--apply", "--json")
        assert code == 0, err
        assert "job digits created" in err
        assert Path(kubectl["CALLS"]).read_text() == "apply -f runs/digits/kubernetes.yaml\n"
        told = json.loads(out)
        assert told["applied"]
        assert told["resource"] == "job/digits"
        assert [d["kind"] for d in yaml.safe_load_all((tmp_path / told["file"]).read_text())] == ["Service", "Job"]

    def test_its_own_words_when_it_refuses(self, submit_with: Submit, kubectl: dict[str, str]) -> None:
        refusal = "Error from server (Forbidden): jobs.batch is forbidden"
        code, _, err = submit_with(kubectl | {"REFUSAL": refusal}, "--kind", "job", "--apply")
        assert code == 3
        assert refusal in err
        assert "Traceback" not in err

    def test_it_is_not_there(self, submit_with: Submit, tmp_path: Path) -> None:
        env = {"PATH": str(tmp_path)}
        code, _, err = submit_with(env, "--kind", "job", "--apply")
        assert code == 3
        assert "kubectl is not on the path, so nothing was submitted" in err
        assert (tmp_path / "runs/digits/kubernetes.yaml").is_file()  # and can be taken to where it is
        assert "a plain Job, which every one does" in submit_with(env)[2]

    @pytest.mark.parametrize(
        ("known", "code", "kind"),
        [
            ("jobs.batch trainjobs.trainer.kubeflow.org pytorchjobs.kubeflow.org", "0", "trainjob"),
            ("jobs.batch notebooks.kubeflow.org pytorchjobs.kubeflow.org", "0", "pytorchjob"),
            ("jobs.batch trainjobs.trainer.kubeflow.org", "1", "trainjob"),  # another group did not answer
            ("jobs.batch", "0", "job"),
        ],
    )
    def test_auto(self, submit_with: Submit, kubectl: dict[str, str], known: str, code: str, kind: str) -> None:
        _, out, err = submit_with(kubectl | {"KNOWN": known, "KNOWN_CODE": code}, "--json")
        assert json.loads(out)["kind"] == kind, err

    def test_no_cluster_answers(self, submit_with: Submit, kubectl: dict[str, str]) -> None:
        _, out, err = submit_with(kubectl | {"KNOWN": "", "KNOWN_CODE": "1"}, "--json")
        assert json.loads(out)["kind"] == "job"
        assert "no cluster answers" in err


class TestExamples:
    FOLDER = ROOT / "examples" / "kubernetes"

    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_what_the_command_writes(self, capsys: Any, monkeypatch: Any, kind: str) -> None:
        monkeypatch.chdir(ROOT)
        line = next(
            line.removeprefix("instep submit kubernetes ")
            for line in (self.FOLDER / "README.md").read_text().splitlines()
            if line.startswith("instep submit kubernetes ") and f"--kind {kind} " in line
        )
        words = line.split()
        at = words.index("--write")
        code, out, err = submit(capsys, *words[:at], *words[at + 2 :], "--dry-run")
        assert code == 0, err
        assert (ROOT / words[at + 1]).read_text() == out
        for manifest in yaml.safe_load_all(out):
            check(manifest)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [
        "yes",
        "NO",
        "null",
        "~",
        "1e3",
        "0x1f",
        "010",
        "1:30",
        "2001-01-01",
        "a: b",
        "- a",
        "#",
        "a #b",
        " a\n b\n",
        "=",
        "<<",
    ]
)
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers(-(2**40), 2**40),
    lambda inner: (
        st.lists(inner.filter(lambda v: not isinstance(v, list)), max_size=4)
        | st.dictionaries(TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)


class TestYaml:
    @given(st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), min_size=1, max_size=3))
    def test_reads_as_it_was(self, documents: list[dict[str, Any]]) -> None:
        assert list(yaml.safe_load_all(to_yaml(documents, "a title\nof two lines"))) == documents

    @given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
    def test_comments_change_nothing(self, document: dict[str, Any]) -> None:
        noted = {key: Commented("why", value) for key, value in document.items()}
        assert yaml.safe_load(to_yaml([{"list": [Commented("one", noted)], **noted}])) == {
            "list": [document],
            **document,
        }

    def test_text_stays_readable(self) -> None:
        assert to_yaml([{"a": {"file.py": "import x\n\nx.y()\n"}}]) == "a:\n  file.py: |\n    import x\n\n    x.y()\n"
