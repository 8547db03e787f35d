"""The calls of the Kubernetes API that the planner makes. The only module that imports lightkube."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import httpx2
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.models.autoscaling_v1 import ScaleSpec
from lightkube.resources.apps_v1 import Deployment, StatefulSet

from headrace_common.errors import (
    ConfigError,
    Conflict,
    HeadraceError,
    NotFound,
    PermissionDenied,
    WorkerGone,
)
from headrace_planner_service.config import Workload, WorkloadState

_KINDS: Final[dict[str, Any]] = {"statefulset": StatefulSet, "deployment": Deployment}
_ERRORS: Final[dict[int, type[HeadraceError]]] = {
    403: PermissionDenied,
    404: NotFound,
    409: Conflict,
}


_CALL_TIMEOUT_S: Final = 10.0


class KubernetesApi:
    """Reads and scales workloads of one namespace."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        """`kubeconfig`: a file, empty for the service account of this pod. `namespace`: empty for theirs.

        Raises ConfigError.
        """
        self._client = AsyncClient(
            _read_config(kubeconfig),
            namespace=namespace or None,
            timeout=httpx2.Timeout(_CALL_TIMEOUT_S),
            lazy=False,
            trust_env=False,
        )

    async def read(self, workload: Workload) -> WorkloadState:
        """The pods of a workload. Raises HeadraceError."""
        try:
            found = await self._client.get(_KINDS[workload.kind], workload.name)
        except (ApiError, httpx2.HTTPError) as error:
            raise _convert(error, f"get {workload}") from error
        status = found.status
        return WorkloadState(
            wanted=found.spec.replicas if found.spec.replicas is not None else 1,
            existing=(status.replicas if status else None) or 0,
            ready=(status.readyReplicas if status else None) or 0,
            is_current=bool(
                status and (status.observedGeneration or 0) >= found.metadata.generation
            ),
        )

    async def scale(self, workload: Workload, count: int, expected: int) -> None:
        """Sets the number of pods. Raises Conflict where it is not `expected`, and other HeadraceErrors."""
        kind = _KINDS[workload.kind].Scale
        try:
            scale = await self._client.get(kind, workload.name)
            given = scale.spec.replicas or 0
            if given != expected:
                raise Conflict(
                    f"{workload} was set to {given} meanwhile, from {expected}",
                    metadata={"workload": str(workload)},
                )
            # The resource version in the metadata makes the API refuse the number of an old view.
            wanted = kind(metadata=scale.metadata, spec=ScaleSpec(replicas=count))
            await self._client.replace(wanted, workload.name)
        except (ApiError, httpx2.HTTPError) as error:
            raise _convert(error, f"scale {workload} to {count}") from error

    async def close(self) -> None:
        await self._client.close()


def _read_config(kubeconfig: str) -> Any:
    try:
        own = KubeConfig.from_service_account
        config = (KubeConfig.from_file(Path(kubeconfig)) if kubeconfig else own()).get()
    except (KubeConfigError, OSError, ValueError) as error:
        source = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's service account"
        raise ConfigError(
            f"{source} cannot be read: {error}; name a file in kubeconfig, or start the planner in a pod with "
            "automountServiceAccountToken"
        ) from error
    if config is None:
        raise ConfigError(f"kubeconfig {kubeconfig} has no current context")
    return config


def _convert(error: ApiError | httpx2.HTTPError, what: str) -> HeadraceError:
    if not isinstance(error, ApiError):
        return WorkerGone(
            f"the Kubernetes API does not answer ({what}): {type(error).__name__} {error}"
        )
    code = error.status.code or 0
    kind = _ERRORS.get(code, WorkerGone)
    return kind(f"the Kubernetes API refused to {what}: {error.status.message}")
