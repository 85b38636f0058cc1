"""``ortops weights``."""

from __future__ import annotations

import argparse

from ortops import weights as model_weights
from ortops.cli.outputs import check_outputs, check_writable
from ortops.cli.standard_streams import print_text, say
from ortops.cli.streams import describe_stream, print_json, source, write_model


def weights(options: argparse.Namespace) -> int:
    """Matches a checkpoint with a model, loads it, or saves the weights of a model as one."""
    given = options.like if options.action == "save" else options.checkpoint
    inputs = {"model": options.model, "checkpoint": None if given == "-" else given}
    check_outputs(inputs, {"output": options.output}, force=options.force)
    check_writable({"output": options.output})
    model = source(options.model)
    if options.action == "match":
        names = model_weights.match(model, given)
        if options.json:
            print_json(
                {
                    "names": names.to_json(),
                    "only_in_checkpoint": names.unmatched_checkpoint,
                    "only_in_model": names.unmatched_model,
                }
            )
        else:
            print_text(repr(names))
        if options.output is None:
            return 0
        write_model(names.attach(model), options.output)
    elif options.action == "load":
        write_model(model_weights.load(model, given), options.output)
    else:
        model_weights.save(model, options.output, like=given)
    say(f"wrote {describe_stream(options.output)}")
    return 0
