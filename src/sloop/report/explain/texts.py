"""Plans, slots and rollouts as text."""

from sloop.actions import Rollout
from sloop.app.hardware import LOCAL
from sloop.text import counted
from sloop.vocabulary import Group, Plan, Slot, StagePlan, Worker


def rollout_text(rollout: Rollout) -> str:
    """`version 2 is canary with 10% of the requests`."""
    share = f" with {rollout.share:.0%} of the requests" if rollout.share else ""
    return f"version {rollout.version} is {rollout.state.value}{share}"


def plan_text(plan: Plan) -> str:
    """A plan's stages: `classify: 2 × small on 4 cores, batches up to 8`."""
    return "; ".join(_stage_text(stage) for stage in plan.stages) or "nothing"


def _stage_text(stage: StagePlan) -> str:
    groups = " + ".join(_group_text(group) for group in stage.groups) or "no replica"
    return f"{stage.stage}: {groups}, batches up to {stage.batch_max}"


def _group_text(group: Group) -> str:
    spec = group.spec
    at = f", {spec.device} of {spec.node}" if spec.device and spec.node else ""
    limits = [f"batches up to {group.batch_max}"] if group.batch_max else []
    limits += [f"{group.rate_rps:.4g} rps"] if group.rate_rps else []
    limits += [f"{group.spare} more than planned"] if group.spare else []
    limited = f" ({', '.join(limits)})" if limits else ""
    return f"{group.count} × {spec.variant} on {slot_text(spec.slot)}{at}{shadow_text(spec.shadow)}{limited}"


def shadow_text(shadow: Worker | None) -> str:
    """` with a shadow of 16 cores and 3 blocks`, or nothing."""
    if shadow is None:
        return ""
    return f" with a shadow of {counted(shadow.cores, 'core')} and {counted(len(shadow.layers), 'block')}"


def slot_text(slot: Slot) -> str:
    """`2 cores`, `1 core reserved`, `4 cores and a T4 of g4dn.xlarge`, `4 cores and 50% of a T4`; with a share
    of 0, which reserves nothing, `4 cores and a shared T4`."""
    text = counted(slot.cores, "core")
    if not slot.is_capped and not slot.accelerator:
        text += " reserved"
    if slot.accelerator:
        part = {1.0: "a", 0.0: "a shared"}.get(slot.share, f"{100 * slot.share:.3g}% of a")
        text += f" and {part} {slot.accelerator}"
    return f"{text} of {slot.hardware}" if slot.hardware and slot.hardware != LOCAL else text


def plan_difference(before: Plan | None, after: Plan) -> str:
    """The changes from one plan to the next, as text."""
    if before is None:
        return "the first plan"
    old = {stage.stage: stage for stage in before.stages}
    changes = [f"was {_stage_text(old[stage.stage])}" for stage in after.stages if stage != old.get(stage.stage, stage)]
    changes += [f"new: {stage.stage}" for stage in after.stages if stage.stage not in old]
    return "; ".join(changes) or "nothing changed"
