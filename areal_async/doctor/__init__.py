"""The doctor: proves or refutes a run's promises from what the run has left, and names what breaks them."""

from areal_async.doctor.audit.examination import examine
from areal_async.doctor.audit.report import Diagnosis

__all__ = ["Diagnosis", "examine"]
