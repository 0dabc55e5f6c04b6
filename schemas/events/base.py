"""What payload models are made of.

A model is the contract of one event type: its fields are the names on the wire, its docstring is the schema's. Allowed
types: str, bool, int (64 bits), float, ``Amount``, ``Instant``, ``Json``, ``Literal`` of texts, ``list`` and
``dict[str, …]`` of those, other models, and any of them ``| None``. A field with the default None may be missing; one
without a default must be there (with ``| None`` it may be null). Ids are text: those of outside systems can be
anything, and a UUID type would change how ours are written.

What must stay true: no other defaults (a default would enter the schema), no validators that change a value (the
payload a consumer reads is the one that was emitted).
"""

from decimal import Decimal
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict


class Mark:
    """Names the Avro form of a type that Python's own types do not tell apart."""

    def __init__(self, form: str) -> None:
        self.form = form


# Decimal as text ("297.90"), on the wire too. Not Avro's decimal: that fixes one scale for ever (a changed scale is
# misread without a word), drops the digits a person typed ("297.90" would come back as 297.9000), and shows as bytes
# in every tool. A JSON number is taken as well; the typed field then has its decimal digits and the number itself
# travels in `extra`.
Amount = Annotated[Decimal, Mark("amount")]

# A moment with its offset, as ISO 8601 text; microseconds since 1970 in UTC on the wire. Naive ones are refused.
Instant = Annotated[AwareDatetime, Mark("instant")]

# Any JSON value; JSON text on the wire.
Json = Annotated[Any, Mark("json")]


class Payload(BaseModel):
    """A payload, or an object inside one. Fields that are not declared are kept (``model_extra``)."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)
