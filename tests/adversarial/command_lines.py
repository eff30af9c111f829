"""Commands of `hf-efficient` that work, for tests that change one argument; paths are those of `command_folder`."""

WANTED = {  # what a command cannot do without; the output is "out" unless a test says otherwise
    "quantize": ["tiny", "--output", "out"],
    "prune": ["tiny", "--output", "out", "--sparsity", "0.5", "--method", "magnitude"],
    "prune-structure": ["tiny", "--output", "out", "--remove", "0.2", "--method", "l1"],
    "export": ["small", "--format", "gptq", "--output", "out"],
    "train-draft": ["tiny", "--output", "out"],
    "recover": ["tiny", "--teacher", "tiny", "--texts", "text.txt", "--output", "out", "--steps", "1"],
    "distill": ["tiny", "--layers", "1", "--texts", "text.txt", "--output", "out", "--steps", "1"],
    "to-bitnet": ["tiny", "--texts", "text.txt", "--output", "out", "--steps", "1"],
    "sparsify-context": ["tiny", "--output", "out", "--calibration", "text.txt", "--num-samples", "1"],
    "estimate": ["tiny"],
    "bench": ["tiny", "--output", "out"],
    "run": ["--model", "tiny", "--config", "int4", "--output", "out", "--text", "text.txt"],
    "evaluate": ["tiny", "--text", "text.txt", "--windows", "1", "--window-length", "16"],
    "push": ["small", "./out"],
}
NEW_OUTPUT = [name for name in WANTED if name not in ("estimate", "bench", "run", "evaluate", "push")]
WITH_MODEL = [name for name in WANTED if name != "push"]


def with_option(command: str, option: str, value: str) -> list[str]:
    """The arguments of `command` with another value of an option, or of "model"."""
    words = [*WANTED[command]]
    option = "--model" if (command, option) == ("run", "model") else option
    if option in words:
        words[words.index(option) + 1] = value
    elif option == "model":
        words[0] = value
    else:
        words += [option, value]
    return [command, *words]
