"""tvq doctor: check the installation on a device."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from transformer_vq.cli.arguments import Device, Json, parse
from transformer_vq.cli.output import print_json


@dataclass(frozen=True)
class DoctorOptions:
    """Check this installation on a device, and print a report for a GitHub issue.

    Compares every implementation of the attention and the decoder with float64, outputs and
    gradients. Repeats steps to find results that are not deterministic, counts
    how often the host waits for a GPU, and measures training and decoding. Takes a few minutes
    on two cores, most of it for torch.compile. The report is Markdown, without names of folders.
    The exit status is 1 if a check failed.
    """

    device: Device = "auto"
    quick: bool = False
    """Do not compile and do not measure speed; about 30 seconds on two cores."""
    json: Json = False


def run(arguments: list[str]) -> int:
    """Print the report; return the exit status."""
    options = parse(DoctorOptions, arguments, "doctor")

    from transformer_vq import doctor
    from transformer_vq.device import find_device

    diagnosis = doctor.examine(find_device(options.device), quick=options.quick)
    print(doctor.markdown(diagnosis))
    print_json(doctor.record(diagnosis), options.json)
    if not diagnosis.failed:
        return 0
    sys.stdout.flush()
    print(f"tvq: {doctor.summary(diagnosis)}", file=sys.stderr)
    return 1
