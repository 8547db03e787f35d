"""Converts time models to and from their messages."""

from __future__ import annotations

from dataclasses import asdict, fields

from headrace.worker.v1 import time_model_pb2
from headrace_common.time_model.model import HandoverTimes, StepTimes, TimeModel

_STEP_FIELDS = tuple(field.name for field in fields(StepTimes))
_HANDOVER_FIELDS = tuple(field.name for field in fields(HandoverTimes))


def step_times_to_proto(times: StepTimes) -> time_model_pb2.StepTimes:
    return time_model_pb2.StepTimes(**asdict(times))


def step_times_from_proto(message: time_model_pb2.StepTimes) -> StepTimes:
    return StepTimes(**{name: getattr(message, name) for name in _STEP_FIELDS})


def time_model_to_proto(model: TimeModel) -> time_model_pb2.TimeModel:
    return time_model_pb2.TimeModel(
        steps=step_times_to_proto(model.steps),
        handovers=_handovers_to_proto(model.handovers),
        links={link: _handovers_to_proto(times) for link, times in model.links.items()},
    )


def time_model_from_proto(message: time_model_pb2.TimeModel) -> TimeModel:
    return TimeModel(
        steps=step_times_from_proto(message.steps),
        handovers=_handovers_from_proto(message.handovers),
        links={link: _handovers_from_proto(times) for link, times in message.links.items()},
    )


def _handovers_to_proto(times: HandoverTimes) -> time_model_pb2.HandoverTimes:
    return time_model_pb2.HandoverTimes(**asdict(times))


def _handovers_from_proto(message: time_model_pb2.HandoverTimes) -> HandoverTimes:
    return HandoverTimes(**{name: getattr(message, name) for name in _HANDOVER_FIELDS})
