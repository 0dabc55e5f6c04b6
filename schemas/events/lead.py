"""lead.*: a deal of a contact moves through a pipeline."""

from pydantic import Field

from schemas.events.base import Amount, Instant, Json, Payload


class Change(Payload):
    """One field before and after."""

    from_: Json = Field(alias="from")
    to: Json


class Created(Payload):
    """A lead was created in a stage of a pipeline."""

    name: str
    source: str
    owner_id: str | None = None
    pipeline_id: str
    stage_id: str


class Updated(Payload):
    """Fields of a lead changed."""

    changes: dict[str, Change]


class StageChanged(Payload):
    """A lead moved to another stage; automation_run names the automation that moved it, if one did."""

    from_stage_id: str
    to_stage_id: str
    automation_run: str | None = None


class Won(Payload):
    """A lead was won."""

    value: Amount
    won_at: Instant
    reason: str | None = None


class Lost(Payload):
    """A lead was lost."""

    reason: str
    lost_at: Instant


class Assigned(Payload):
    """A lead got another owner."""

    from_owner_id: str | None = None
    to_owner_id: str


class Deleted(Payload):
    """A lead was deleted; soft says that its row is still there."""

    soft: bool
    deleted_by: str


class ActivityRecorded(Payload):
    """Something was done about a lead: a call, a note, a meeting."""

    activity_type: str
    lead_id: str
    content_excerpt: str


EVENTS: dict[str, type[Payload]] = {
    "lead.created": Created,
    "lead.updated": Updated,
    "lead.stage_changed": StageChanged,
    "lead.won": Won,
    "lead.lost": Lost,
    "lead.assigned": Assigned,
    "lead.deleted": Deleted,
    "lead_activity.recorded": ActivityRecorded,
}
