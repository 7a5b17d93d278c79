"""Nothing breaks: what the figures are without a fault."""

from tests.fault.faults import Fault, nothing

FAULT = Fault(break_it=nothing, lasts_s=4.0, is_noticed=False)
