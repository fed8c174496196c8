"""What every section of the settings is."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticKnownError

from areal_async.fields import INT64


class Section(BaseModel):
    """A frozen part of the settings in which unknown keys are refused, and numbers that nothing could hold.

    Those are floats that are not finite, and whole numbers beyond 64 bits, whatever else a field asks for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and value not in INT64:
            bound = {"ge": INT64.start} if value < 0 else {"le": INT64.stop - 1}
            raise PydanticKnownError("greater_than_equal" if value < 0 else "less_than_equal", bound)
        return value
