"""The help of `hf-efficient`: it is quick, lists every command by task, and documents every key of --json."""

import subprocess
import sys

import pytest

from hf_efficient.cli import main, parser


def printed(*arguments: str, capsys) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_commands_stand_under_their_tasks(capsys):
    text = printed("--help", capsys=capsys)
    lines = text.splitlines()
    places = [lines.index(f"{task}:") for task in parser.GROUPS]
    assert places == sorted(places) and "positional arguments" not in text
    for task, commands in parser.GROUPS.items():
        below = lines[lines.index(f"{task}:") + 1 :][: len(commands)]
        assert [line.split()[0] for line in below] == [*commands]


@pytest.mark.parametrize("command", [name for name in parser.COMMANDS if name not in parser.HAND_OVER])
def test_every_command_is_quiet_or_json_and_says_its_keys(command, capsys):
    text = printed(command, "--help", capsys=capsys)
    assert "--quiet" in text and "--json" in text
    below = text.partition("keys of --json:\n")[2].splitlines()
    assert [line.split()[0] for line in below] == [*parser.load(command).KEYS]


def test_help_imports_neither_torch_nor_transformers():
    code = (
        "import sys\nfrom hf_efficient.cli import main\n"
        "try:\n    main(['quantize', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'rich', 'tqdm', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
