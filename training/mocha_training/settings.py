"""What typed settings have in common: they never change, and know all their names."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Fields that are refused where there is no such name, or numbers are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def having(self, **changes: Any) -> Self:
        """With these fields instead of its own.

        Raises ValueError for a field that there is not, or a value that it cannot have; `model_copy` checks neither.
        """
        return self.model_validate({name: getattr(self, name) for name in self.model_fields_set} | changes)
