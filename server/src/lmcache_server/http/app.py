"""The routes. Handlers run in threads, one connection to the daemon each; names LMCache users know keep working."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Path, Request, Response
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from lmcache_core import __version__
from lmcache_core.spi import BackendError, ConfigError, Secret
from lmcache_core.spi.errors import DeadlineExceeded, Unavailable
from lmcache_core.wire import records, replies
from lmcache_core.wire.codec import to_keys, to_runs
from lmcache_server.client.operator import Operator, parse_keys, parse_space
from lmcache_server.http import bodies
from lmcache_server.http.guard import Guard
from lmcache_server.metrics import CONTENT_TYPE, exposition

Document = dict[str, Any]
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (ConfigError, 400), (DeadlineExceeded, 504), (Unavailable, 503), (BackendError, 409),
)  # fmt: skip
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "Not possible as configured"},
    401: {"description": "The token is needed"},
    403: {"description": "Host or Origin is not allowed"},
    409: {"description": "The daemon refused"},
    411: {"description": "The length of the body is not said"},
    413: {"description": "The body is too long"},
    503: {"description": "The daemon is not there"},
    504: {"description": "The daemon did not answer in time"},
}


def create(operator: Operator, token: Secret, *, hosts: tuple[str, ...] = ()) -> FastAPI:
    """The application in front of one daemon.

    Args:
        token: needed to change something, and by peers of other machines for everything.
        hosts: names besides localhost under which it is reached.
    """
    app = FastAPI(
        title="LMCache", version=__version__, docs_url=None, redoc_url=None, responses=_RESPONSES
    )  # pages for reading the schema would load scripts from elsewhere
    app.add_middleware(Guard, token=token, hosts=hosts)
    for error, status in _STATUS:
        app.add_exception_handler(error, _answer(status))
    app.include_router(_looking(operator))
    app.include_router(_values(operator))
    app.include_router(_changing(operator))
    return app


def create_scraped(operator: Operator) -> Starlette:
    """What a scraper asks for and nothing else, for a port that others reach: no token, no name checked."""

    def metrics(request: Request) -> Response:
        return Response(exposition(operator.snapshot()), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[Route("/metrics", metrics)],
        exception_handlers={error: _answer(status) for error, status in _STATUS},
    )


def _answer(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error).split("\n", 1)[0]}, status)

    return answer


def _looking(operator: Operator) -> APIRouter:
    router = APIRouter(tags=["looking"])

    @router.get("/")
    def root() -> Document:
        """What this is."""
        return {"name": "lmcache", "version": __version__, "openapi": "/openapi.json"}

    @router.get("/live")
    def live() -> Document:
        """This process answers."""
        return {"status": "live"}

    @router.get("/ready")
    @router.get("/health")
    @router.get("/healthcheck")
    def ready() -> Document:
        """The daemon answers."""
        operator.do(replies.Done, records.Ping)
        return {"status": "healthy"}

    @router.get("/status")
    def status() -> Document:
        """The daemon, its memory, tiers, tenants, key spaces, clients and engines."""
        found = {name: each for name, each in operator.describe().items() if name != "config"}
        for engine in found["engines"].values():
            del engine["root"]  # who has it can tell which prompts are cached
        return found

    @router.get("/config")
    def config() -> list[Document]:
        """Every effective setting and where it came from; secrets are not shown."""
        found: list[Document] = operator.describe()["config"]
        return found

    @router.get("/spaces")
    def spaces() -> list[Document]:
        """Key spaces: their engines and layouts, and what each tier holds of them."""
        found: list[Document] = operator.describe()["spaces"]
        return found

    @router.get("/quota")
    def quotas() -> Document:
        """Quotas by tenant, and what tenants use now, in bytes."""
        found = operator.describe()
        return {"quotas": found["quotas"], "used": found["tenants"]}

    @router.get("/quota/{tenant}")
    def quota(tenant: bodies.NamePath) -> Document:
        """One tenant's quota, null for none, and what it uses now, in bytes."""
        found = operator.describe()
        used = found["tenants"].get(tenant, 0)
        return {"tenant": tenant, "nbytes": found["quotas"].get(tenant), "used": used}

    @router.get("/freeze/status")
    def frozen() -> Document:
        """Whether new values are refused."""
        return {"frozen": operator.describe()["frozen"]}

    @router.get("/tiers")
    def tiers() -> list[Document]:
        """Lower tiers in lookup order."""
        found: list[Document] = operator.describe()["tiers"]
        return found

    @router.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """For Prometheus."""
        return Response(exposition(operator.snapshot()), media_type=CONTENT_TYPE)

    return router


def _values(operator: Operator) -> APIRouter:
    router = APIRouter(prefix="/cache", tags=["values"])

    @router.get("/objects")
    def objects(
        tier: bodies.NameQuery = None,
        space: bodies.SpaceQuery = None,
        after: bodies.Cursor = None,
        limit: bodies.Limit = 1000,
    ) -> Document:
        """One page of a tier's values (of memory, when none is named); go on with `after`."""
        page = operator.list(tier or "", parse_space(space or ""), after=after, limit=limit)
        pinned = {page.keys[at] for at in page.pinned}
        rows = [
            {"key": key, "bytes": nbytes, "pinned": key in pinned}
            for key, nbytes in zip(page.keys, page.nbytes, strict=True)
        ]
        return {"objects": rows, "after": page.after}

    @router.get("/changes")
    def changes(since: bodies.Since = None, limit: bodies.Limit = 1000) -> Document:
        """What came to memory and to local tiers and left them; go on with `next`.

        `lost` says that some changes are not kept any more: list the objects, then go on.
        """
        found = operator.do(replies.Changed, lambda id: records.Follow(id, since, limit))
        rows = [
            {
                "tier": each.tier,
                "there": each.there,
                "keys": [key.text for key in to_keys(each.runs)],
            }
            for each in found.changes
        ]
        return {"next": found.next, "lost": found.lost, "tiers": found.tiers, "changes": rows}

    @router.delete("/objects")
    def delete(body: bodies.Deletion) -> Document:
        """Forget values; counts the copies there were."""
        keys = parse_keys(body.keys)

        def make(id: int) -> records.Message:
            return records.Delete(id, to_runs(keys), body.seconds, body.tier or "")

        if body.tier:
            _known(operator, body.tier)
        return {"deleted": operator.do(replies.Count, make, seconds=body.seconds).count}

    @router.post("/clear")
    def clear(body: bodies.Clearing) -> Document:
        """Forget values of a tier, a key space or a tag, or all of them."""
        if body.tag and (body.tier or body.space):
            raise ConfigError("a tag is cleared everywhere: it goes without tier and space")
        if body.tier:
            _known(operator, body.tier)
        space = parse_space(body.space or "")

        def make(id: int) -> records.Message:
            return records.Clear(id, body.seconds, body.tier or "", space, body.tag or "")

        return {"cleared": operator.do(replies.Count, make, seconds=body.seconds).count}

    @router.get("/pins")
    def pins() -> Document:
        """How much is pinned, and how much may be."""
        found: Document = operator.describe()["pins"]
        return found

    @router.post("/pins")
    def pin(body: bodies.Pinning) -> Document:
        """Keep values in memory for so many seconds, as far as the share for it goes."""
        found = operator.pin(parse_keys(body.keys), body.lasts, seconds=body.seconds)
        return {"pinned": found.count, "bytes": found.nbytes}

    @router.delete("/pins")
    def unpin(body: bodies.Unpinning) -> Document:
        """Keep these values no longer, or none when no key is named."""
        found = operator.pin(parse_keys(body.keys), 0.0, seconds=10.0)
        return {"unpinned": found.count, "bytes": found.nbytes}

    @router.post("/checksums")
    def checksums(body: bodies.Checksums) -> list[Document]:
        """SHA-256 of values, empty where there is none; each is loaded and verified."""
        return [asdict(operator.checksum(key)) for key in parse_keys(body.keys)]

    @router.post("/move")
    def move(body: bodies.Moving) -> Document:
        """Copy values from one tier to another and forget them in the first."""
        moved = operator.move(
            parse_keys(body.keys), body.source, body.target,
            forget=not body.copy_only, seconds=body.seconds,
        )  # fmt: skip
        return {"moved": moved}

    @router.post("/prefetches", status_code=202)
    def prefetch(body: bodies.Keys, response: Response) -> Document:
        """Begin to bring values up; ask for the job to learn how it went."""
        number = operator.bring_up(parse_keys(body.keys), seconds=body.seconds)
        response.headers["location"] = f"/cache/prefetches/{number}"
        return {"id": number}

    @router.get("/prefetches/{number}", responses={404: {"description": "No such job"}})
    def job(number: Annotated[int, Path(ge=0, le=(1 << 63) - 1)]) -> Document:
        """How a prefetch stands: running, done (with the count that is resident) or lost."""
        found = operator.job(number)
        if found is None:
            raise HTTPException(404, f"there is no prefetch {number}")
        return {"id": number, "state": found.state, "count": found.count, "reason": found.reason}

    return router


def _changing(operator: Operator) -> APIRouter:
    router = APIRouter(tags=["changing"])

    @router.put("/quota/{tenant}")
    def set_quota(tenant: bodies.NamePath, body: bodies.Limited) -> Document:
        """Limit a tenant's memory; `default` is everybody who has no quota of his own."""
        operator.do(replies.Done, lambda id: records.Quota(id, tenant, body.nbytes))
        return {"tenant": tenant, "nbytes": body.nbytes}

    @router.delete("/quota/{tenant}")
    def drop_quota(tenant: bodies.NamePath) -> Document:
        """Limit a tenant no longer."""
        operator.do(replies.Done, lambda id: records.Quota(id, tenant))
        return {"tenant": tenant, "nbytes": None}

    @router.put("/freeze/{what}")
    def freeze(what: Annotated[str, Path(pattern="^(enable|disable)$")]) -> Document:
        """Refuse new values, or accept them again."""
        operator.do(replies.Done, lambda id: records.Freeze(id, what == "enable"))
        return {"frozen": what == "enable"}

    @router.post("/flush")
    def flush(body: bodies.Timed) -> Document:
        """Write what is only in memory to the tiers that want it; tells what is left."""
        left = operator.do(
            replies.Count, lambda id: records.Flush(id, body.seconds), seconds=body.seconds
        )
        return {"left": left.count, "left_bytes": left.nbytes}

    @router.put("/tiers/{name}/limit")
    def resize(name: bodies.NamePath, body: bodies.Limited) -> Document:
        """Change a lower tier's size; a smaller one evicts at once."""

        def make(id: int) -> records.Message:
            return records.Tier(id, name, "limit", body.nbytes)

        operator.do(replies.Done, make)
        return {"name": name, "limit": body.nbytes}

    @router.put("/tiers/{name}/disable")
    def disable(name: bodies.NamePath, body: bodies.Timed) -> Document:
        """Write what a lower tier still wants, then serve from it no more."""

        def make(id: int) -> records.Message:
            return records.Tier(id, name, "remove", 0, body.seconds)

        operator.do(replies.Done, make, seconds=body.seconds)
        return {"name": name, "enabled": False}

    @router.put("/tiers/{name}/enable")
    def enable(name: bodies.NamePath) -> Document:
        """Serve again from a configured tier, where it stood."""
        operator.do(replies.Done, lambda id: records.Tier(id, name, "restore"))
        return {"name": name, "enabled": True}

    @router.post("/reload")
    def reload() -> Document:
        """Read the configuration again: log level and quotas change at once; lower tiers come, change and go."""
        operator.do(replies.Done, records.Reload)
        return {"reloaded": True}

    @router.put("/loglevel")
    def log_level(body: bodies.Level) -> Document:
        """Change how much the daemon logs."""
        operator.do(replies.Done, lambda id: records.LogLevel(id, body.level))
        return {"level": body.level}

    return router


def _known(operator: Operator, tier: str) -> None:
    """A mistyped tier must not look like one that is empty.

    Raises:
        ConfigError: there is no such tier.
    """
    known = operator.tiers()
    if tier not in known:
        raise ConfigError(f"there is no tier {tier!r}; there are: {', '.join(known)}")
