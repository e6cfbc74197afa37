"""The `symcomm` command: what it loads, what it refuses and in which words, and how lines are put together."""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from symcomm.cli import main
from symcomm.errors import BadArgumentError
from symcomm.launcher import job, verdict
from symcomm.launcher.output import MAX_LINE, LineStream, want_color
from tests.support.command import SRC, symcomm

pytestmark = pytest.mark.without_torch

# --- the command ---------------------------------------------------------------------------------


def test_help_lists_commands_without_loading_them():
    code = "import sys; from symcomm.cli.main import main; sys.argv = ['symcomm', '--help']\ntry: main()\nfinally: "
    code += "print('LOADED', *sys.modules, file=sys.stderr)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = set(result.stderr.split())
    assert result.returncode == 0 and {"symcomm", "typer"} <= loaded
    assert not loaded & {"torch", "numpy", "symcomm._core", "symcomm.cli.run", "symcomm.launcher.launch"}
    for name in ("run", "trace", "top", "doctor", "bench", "demo", "version"):
        assert re.search(rf"^  {name} +\S", result.stdout, re.M)


@pytest.mark.parametrize("arguments", [(), *((name,) for name in main.LAZY_COMMANDS)], ids=" ".join)
def test_every_help_has_an_example(arguments):
    result = symcomm(*arguments, "--help")
    assert result.returncode == 0 and re.search(r"^  Examples?:\n    symcomm ", result.stdout, re.M)


def test_launcher_never_loads_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "ok.py").write_text("print('fine')")
    result = symcomm("run", "ok.py", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{SRC}")
    assert (result.returncode, result.stdout) == (0, "[rank 0] fine\n")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("bnech", "; did you mean bench?"), ("Doctor", "; did you mean doctor?"), ("nonsense", "."),
        ("train.py", "; a script is started with `symcomm run train.py`."),
    ],
)  # fmt: skip
def test_an_unknown_command_names_the_nearest(name, end):
    result = symcomm(name)
    sentence = f"symcomm: COMMAND must be one of {', '.join(main.LAZY_COMMANDS)}, got {name!r}{end}\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", sentence)


@pytest.mark.parametrize("arguments", [["demo"], ["bench"], *(["bench", name] for name in ("p2p", "ddp", "sites"))])
def test_commands_that_need_torch_say_so(arguments):
    code = "import sys; sys.modules['torch'] = None; from symcomm.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    words = " ".join(arguments if arguments != ["bench"] else ["bench", "all_reduce"])
    sentence = f"symcomm {words}: this needs torch, which is not installed; run `pip install 'symcomm[torch]'`.\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", sentence)


def test_version_says_what_a_bug_report_needs():
    result = symcomm("version")
    assert result.returncode == 0 and symcomm("--version").stdout == result.stdout.splitlines()[0] + "\n"
    assert re.search(r"^symcomm \d+\.\d+", result.stdout, re.M) and sys.executable in result.stdout
    assert re.search(r"^C core +(/.*_native.*\.so|cannot be loaded)", result.stdout, re.M)
    assert re.search(r"^torch +(\d|not installed)", result.stdout, re.M)


def test_table_names_only_what_exists(monkeypatch):
    monkeypatch.setitem(main.LAZY_COMMANDS, "ghost", ("symcomm.cli.ghost", "Not there."))
    group = main.typer.main.get_command(main.app)
    assert "run" in group.list_commands(None) and "ghost" not in group.list_commands(None)
    assert group.get_command(None, "ghost") is None


def test_shell_completion_knows_the_commands():
    result = symcomm(_SYMCOMM_COMPLETE="complete_bash", COMP_WORDS="symcomm ve", COMP_CWORD="1")
    assert result.stdout.split() == ["version"]
    options = symcomm(_SYMCOMM_COMPLETE="complete_bash", COMP_WORDS="symcomm run --no", COMP_CWORD="2")
    assert {"--node-rank", "--no-python"} <= set(options.stdout.split())


# --- what runs -----------------------------------------------------------------------------------


def test_options_after_the_script_are_the_scripts(tmp_path):
    (tmp_path / "args.py").write_text("import sys; print(sys.argv[1:])")
    for before in ([], ["--"]):
        result = symcomm(
            "run", "-n", "1", *before, "args.py", "--lr", "3", "-n", "7", "--", "-m", "--help", cwd=tmp_path
        )
        assert result.stdout == "[rank 0] ['--lr', '3', '-n', '7', '--', '-m', '--help']\n", result.stderr


def test_module_directory_and_program(tmp_path):
    package = tmp_path / "pack" / "deep"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__main__.py").write_text("print(__name__, __package__)")
    (package / "mod.py").write_text("import sys; print(__package__, sys.argv[1:])")
    (tmp_path / "prog").write_text("#!/bin/sh\necho shell $RANK $1\n")
    (tmp_path / "prog").chmod(0o755)
    for arguments, shown in [
        (("-m", "pack.deep.mod", "-x"), "pack.deep ['-x']"),
        (("-m", "pack.deep"), "__main__ pack.deep"),
        (("--env", "PYTHONPATH=pack", "-m", "deep.mod"), "deep []"),
        (("pack/deep",), "__main__ "),
        (("--no-python", "./prog", "-n"), "shell 0 -n"),
        (("--no-python", "echo", "hi"), "hi"),
    ]:
        result = symcomm("run", *arguments, cwd=tmp_path)
        assert (result.returncode, result.stdout) == (0, f"[rank 0] {shown}\n"), result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nosuch.py"], r"script must be a file \(looked in .*\), got 'nosuch.py'; for a module say `-m`"),
        (["empty"], r"script must be a file or a directory with a __main__.py, got 'empty'"),
        (["-m", "nosuch.mod"], "-m must be a module that this Python can find .*, got 'nosuch.mod'"),
        (["-m", "script.py"], "-m must be a module that .*, got 'script.py'; leave out -m to run a file"),
        (["-m", "a-b"], "-m must be a module's dotted name, as in an import statement, got 'a-b'"),
        (["-m", "json"], "-m must be a module or a package with a __main__.py, got 'json'"),
        (["--no-python", "./plain"], r"program must be executable, got './plain'; `chmod \+x ./plain`"),
        (["--no-python", "nosuchprog"], "program must be an executable file or a command on PATH"),
        (["--no-python", "./noshebang"], r"\./noshebang cannot be started \(Exec format error\)"),
        (["-m", "--no-python", "json"], "-m and --no-python contradict each other"),
        (["-n", "0", "script.py"], "-n must be a number of 1 or more, auto, cpu or gpu, got '0'"),
        (["-n", "many", "script.py"], "-n must be a number of 1 or more, auto, cpu or gpu, got 'many'"),
        (["-n", "gpu", "script.py"], r"-n gpu, but there is no GPU here \(CUDA_VISIBLE_DEVICES hides all\)"),
        (["--nnodes", "0", "script.py"], "--nnodes must be 1 or more, got 0"),
        (["--nnodes", "2", "script.py"], "--node-rank is missing; with --nnodes 2"),
        (["--nnodes", "2", "--node-rank", "1", "script.py"], "--rdzv-endpoint is missing; with --nnodes 2"),
        (["--nnodes", "2", "--node-rank", "2", "script.py"], "--node-rank must be 0 to 1, got 2"),
        (["--node-rank", "1", "script.py"], "--node-rank must be 0, got 1; the job has --nnodes 1"),
        (["--rdzv-endpoint", "here", "script.py"], "--rdzv-endpoint must be host:port .*, got 'here'"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h:1", "--max-restarts", "1", "script.py"],
            "--max-restarts must be 0 with --nnodes 2, got 1; write --nnodes 2:2",
        ),
        (["--max-restarts", "-1", "script.py"], "--max-restarts must be 0 or more, got -1"),
        (["--grace", "-1", "script.py"], "--grace must be 0 or more seconds, got -1"),
        (["--env", "NOVALUE", "script.py"], "--env must be KEY=VALUE, got 'NOVALUE'"),
        (
            ["--env", "RANK=3", "script.py"],
            "--env must be a variable that the launcher does not set itself, got 'RANK'",
        ),
        (["--tag", "a/b", "script.py"], "--tag must be letters, digits and any of"),
        (
            ["--trace", "/proc/nothing/dumps", "script.py"],
            "--trace must be a folder that can be written or made, got '/proc/nothing/dumps'; .* /proc cannot",
        ),
        (["--trace", "plain/dumps", "script.py"], r"--trace must be a folder .* \(Not a directory\)"),
        (["--log-dir", "/proc/nothing", "script.py"], "--log-dir: /proc/nothing/.* cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_sentence_and_code_2(tmp_path, arguments, sentence):
    (tmp_path / "script.py").write_text("print('started')")
    (tmp_path / "plain").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "noshebang").write_text("nothing a kernel knows")
    (tmp_path / "noshebang").chmod(0o755)
    result = symcomm("run", *arguments, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(rf"symcomm run: {sentence}.*\.\n", result.stderr), result.stderr


def test_looking_for_a_module_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "loud").mkdir()
    (tmp_path / "loud" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "loud" / "inner.py").write_text("")
    monkeypatch.chdir(tmp_path)
    job.check_module("loud.inner")
    with pytest.raises(BadArgumentError):
        job.check_module("loud.other")
    assert "loud" not in sys.modules and str(tmp_path) not in sys.path


def test_counts():
    assert job.parse_count("3") == 3
    assert job.parse_count("auto") == job.parse_count("cpu") == len(os.sched_getaffinity(0))
    for visible, count in [("0,1,2", 3), ("GPU-abc,GPU-def", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), (" 3 ", 1)]:
        assert job.count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_endpoints():
    assert job.parse_endpoint("node0:29500") == ("node0", 29500)
    assert job.parse_endpoint("[fe80::1]:1") == ("fe80::1", 1)
    for text in ("node0", "node0:", ":1", "node0:0", "node0:65536", "a b:1", "::1:1", "tcp://a:1"):
        with pytest.raises(BadArgumentError, match="--rdzv-endpoint"):
            job.parse_endpoint(text)


def test_reserved_port_is_kept_from_others_and_free_for_rank_0():
    with job.reserve_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        for _ in range(300):
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stranger.bind(("", 0))
                assert stranger.getsockname()[1] != port


# --- lines ---------------------------------------------------------------------------------------


def shown(stream: LineStream, *pieces: bytes, now: float = 0.0) -> bytes:
    return b"".join(stream.feed(piece, now) for piece in pieces)


@settings(deadline=None)
@given(st.binary(max_size=200).map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_they_arrive(data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    stream = LineStream(b"> ")
    text = shown(stream, *(data[a:b] for a, b in itertools.pairwise(edges))) + stream.finish()
    lines = data.split(b"\n")
    lines = lines[:-1] if lines[-1] == b"" else lines
    assert text == b"".join(b"> " + line + b"\n" for line in lines)


def test_progress_bars_are_shown_once_a_second_and_at_their_end():
    stream = LineStream(b"> ")
    assert stream.feed(b"\r 0%", now=0.0) == b"> \r 0%\n".replace(b"\r", b"")
    assert stream.feed(b"\r 1%", now=0.1) == stream.feed(b"\r 2%", now=0.2) == b""
    assert stream.tick(now=0.9) == b""
    assert stream.tick(now=1.0) == b">  2%\n"  # also when nothing more comes
    assert stream.tick(now=9.0) == b""  # but not twice
    assert stream.feed(b"\r99%", now=1.5) == b""
    assert stream.feed(b"\r100%\nnext\n", now=1.6) == b"> 100%\n> next\n"
    assert list(stream.tail) == [b"100%", b"next"]


def test_a_bar_that_was_just_shown_is_not_repeated_at_its_end():
    stream = LineStream(b"> ")
    assert shown(stream, b"\rdone", b"\n", b"done\n") == b"> done\n> done\n"


@pytest.mark.parametrize("pieces", [(b"a\r\nb\r\n",), (b"a\r", b"\nb", b"\r\n"), (b"a", b"\r\n", b"b\r\n")])
def test_windows_line_ends_are_line_ends(pieces):
    stream = LineStream(b"> ")
    assert shown(stream, *pieces) + stream.finish() == b"> a\n> b\n"


def test_line_without_an_end_does_not_fill_memory():
    stream = LineStream(b"> ")
    text = shown(stream, *[b"x" * 65536] * 100)
    assert text.count(b"x") >= 99 * 65536 - MAX_LINE and len(stream._held) <= MAX_LINE
    assert (text + stream.finish()).count(b"x") == 6553600


def test_color_choice():
    assert want_color(None, {}, True) and not want_color(None, {}, False)
    assert not want_color(None, {"NO_COLOR": "1"}, True) and want_color(None, {"NO_COLOR": ""}, True)
    assert want_color(True, {"NO_COLOR": "1"}, False) and not want_color(False, {}, True)
    assert not want_color(None, {"TERM": "dumb"}, True)


def test_fates_put_ranks_with_the_same_end_together():
    def end(rank: int, returncode: int | None, after: int = 0) -> verdict.RankEnd:
        return verdict.RankEnd(rank, 100 + rank, returncode, 1.0, after)

    ends = [end(0, -15, 15), end(1, -15, 15), end(2, -15, 15), end(3, 0), end(4, 1), end(5, -9, 9), end(6, None, 9)]
    assert verdict.fates(ends, grace=5) == (
        "ranks 0-2 stopped on SIGTERM; rank 3 had finished; rank 4 also failed (exited with code 1); "
        "rank 5 had to be killed (grace 5 s); rank 6 cannot be ended (pid 106 hangs in the kernel)"
    )
    assert [verdict.exit_code(e) for e in (end(0, 7), end(0, -11), end(0, None))] == [7, 139, 137]
