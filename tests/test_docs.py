"""Every command and flag in README and docs is real: parsed by its program, run with --dry-run where it trains."""

import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from miles_disagg import cli
from miles_disagg.cluster.doctor import PROBE_GROUP
from miles_disagg.config.flags import flag_names, parse_run
from miles_disagg.config.reference import BEGIN, END, reference
from miles_disagg.config.service import service_flags
from tests.fakes.checkpoints import EXPERTS, write_tiny_checkpoint

ROOT = Path(__file__).parents[1]
PAGES = [p for p in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))) if p.exists()]
SHELL = {"bash", "sh", "shell", "console"}
# Flags of Ray and SGLang that prose may name.
FOREIGN = {"--working-dir", "--head", "--address", "--dashboard-host", "--logdir", "--generate"}
FOREIGN |= {"--custom-weight-loader", "--disable-radix-cache", "--sleep-on-idle", "--mem-fraction-static", "--no-deps"}
FOREIGN |= {"--attention-backend", "--sampling-backend", "--grammar-backend", "--cuda-graph-max-bs"}
FOREIGN |= {"--incremental-streaming-output", "--disable-cuda-graph", "--base-gpu-id", "--pd-disaggregation"}
FOREIGN |= {"--nnodes", "--node-rank", "--dist-init-addr"}
FOREIGN |= {"--disaggregation-mode", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"}
# Programs whose own options are their business.
OTHERS = {
    "git",
    "cd",
    "pip",
    "ray",
    "python3",
    "source",
    "export",
    "cat",
    "ls",
    "tail",
    "curl",
    "tensorboard",
    "pytest",
}


@dataclass(frozen=True)
class Command:
    """One simple command of a page: its words, without environment assignments and `ray job submit ... --`."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def commands() -> list[Command]:
    """Simple commands in shell code blocks; one may go on over lines by a backslash or inside quotes."""
    found = []
    for page in PAGES:
        language, held, start = None, "", 0
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            fence = re.match(r"\s*```(\w*)", line)
            if fence:
                assert not held, f"{page.name}:{start}: a command without an end"
                language = None if language is not None else fence.group(1)
            elif language in SHELL:
                start = start if held else number
                held += line.strip().removeprefix("$ ").removesuffix("\\") + " "
                words = None if line.rstrip().endswith("\\") else split(held)
                if words is not None:
                    found += [Command(page.name, start, simple) for simple in simple_commands(words)]
                    held = ""
    return found


def split(text: str) -> list[str] | None:
    """Words and operators of a command line; None if a quote is still open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return None


def simple_commands(words: list[str]) -> list[tuple[str, ...]]:
    """Commands between `&&`, `|` and `;`, without redirections."""
    out: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "||", "|", ";", "&"):
            out.append([])
        else:
            out[-1].append(word)
    return [tuple(unwrapped(simple)) for simple in out if unwrapped(simple)]


def unwrapped(words: list[str]) -> list[str]:
    words = list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    return words


def training_flags(words: Sequence[str]) -> list[str] | None:
    """Flags of a command that starts a training run; None for any other command."""
    name = Path(words[0]).name if words else ""
    if name == "miles-disagg" and words[1:2] == ("train",):
        return list(words[2:])
    if name.startswith("python") and words[1:2] == ("train_async.py",):
        return list(words[2:])
    if name == "bash" and words[1:2] == ("scripts/quickstart.sh",):
        return ["--config", "configs/quickstart.yaml", *words[2:]]
    return None


ALL = commands()
TRAINING = [c for c in ALL if training_flags(c.words) is not None]
OTHER = [c for c in ALL if training_flags(c.words) is None]


@pytest.mark.parametrize("command", TRAINING, ids=str)
def test_a_documented_run_passes_its_dry_run(command: Command, tmp_path: Path, capsys, monkeypatch):
    flags = stand_ins(training_flags(command.words) or [], tmp_path)
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", *flags, "--dry-run", "--run-dir", str(tmp_path / "run")]) == 0, capsys.readouterr().err


def stand_ins(flags: list[str], tmp_path: Path) -> list[str]:
    """The flags with a tiny checkpoint and other real files in the place of a reader's own."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1+1=", "prompt": "1+1=", "label": "2"}\n')
    out = list(flags)
    for name, value in (("--prompt-data", prompts), ("--sglang-python", sys.executable)):
        if name in out:
            out[out.index(name) + 1] = str(value)
    config = parse_run(out)
    experts = EXPERTS if config.trainer.expert_model_parallel_size > 1 else {}
    model = write_tiny_checkpoint(tmp_path / "model", vocab_size=64, **experts)
    out += ["--hf-checkpoint", str(model)]
    if config.rollout.rollout_max_response_len >= 64:
        out += ["--rollout-max-response-len", "32"]
    if config.engines.rollout_num_gpus or config.trainer.trainer_device == "cuda":
        out += ["--ray-address", "auto"]  # this machine's GPUs are not the reader's
    if "--no-apply-chat-template" not in out:
        out += ["--no-apply-chat-template"]
    return out


@pytest.mark.parametrize("command", OTHER, ids=str)
def test_any_other_documented_command_is_understood(command: Command):
    words = command.words
    name = Path(words[0]).name
    if name == "miles-disagg":
        assert words[1] in cli.COMMANDS or words[1] == "--help", f"no such command: {words[1]}"
        if len(words) > 2:
            assert_flags_in_help([sys.executable, "-m", "miles_disagg.cli", words[1], "--help"], words[2:])
    elif name.startswith("python") and words[1].startswith("scripts/"):
        assert (ROOT / words[1]).is_file(), f"no such script: {words[1]}"
        assert_flags_in_help([sys.executable, words[1], "--help"], words[2:])
    elif name == "bash":
        assert (ROOT / words[1]).is_file(), f"no such script: {words[1]}"
    else:
        assert name in OTHERS, f"{command}: unknown program {name}"


def assert_flags_in_help(argv: list[str], words: Sequence[str]) -> None:
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    if flags:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        for flag in flags:
            assert flag in done.stdout, f"{' '.join(argv[1:3])} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_flag_a_page_mentions_exists(page: Path):
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", page.read_text()))
    known = {*flag_names(), *(name.replace("--", "--no-", 1) for name in flag_names()), *FOREIGN, *script_flags()}
    known |= {name for name in mentioned if name.startswith("--sglang-")} | {*service_flags(), PROBE_GROUP}
    assert mentioned <= known, f"no program has {sorted(mentioned - known)}"


def script_flags() -> set[str]:
    """Flags that our scripts and commands other than train declare, by their source."""
    sources = [*(ROOT / "scripts").glob("*"), *(ROOT / "miles_disagg").rglob("*.py")]
    text = "\n".join(source.read_text() for source in sources if source.suffix in (".py", ".sh"))
    declared = re.findall(r'add_argument\(\s*(?:"-\w",\s*)?"(--[\w-]+)"', text)
    return {*declared, "--help", "--fix"}


def test_the_configuration_page_has_the_flags_of_today():
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.split(BEGIN)[1].split(END)[0].strip()
    assert table == reference(), "run: python -m miles_disagg.config.reference docs/configuration.md"
