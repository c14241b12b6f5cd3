"""Where credentials come from, and how they stay valid without anybody waiting for them."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Callable
from typing import Generic, TypeVar

from lmcache_backend_s3.bucket import Bucket, text
from lmcache_backend_s3.sign import Keys
from lmcache_backend_s3.transport import Call
from lmcache_core.spi import BackendError, ConfigError, Context, Unavailable

T = TypeVar("T")
CHAIN_S = 60.0
"""How often the credential chain is asked whether it has something newer; it knows itself what expires when."""
ALLOWANCE_S = 240.0
"""Renewal before a token ends."""
PATIENCE_S = 5.0
SESSION_S = 180.0


class Renewed(Generic[T]):
    """A value that is fetched once in the open and from then on behind the back of those who use it.

    Args:
        fetch: gives the value and for how many seconds it is to be used before the next fetch; may block.
    """

    def __init__(self, fetch: Callable[[], tuple[T, float]], context: Context) -> None:
        self._fetch = fetch
        self._context = context
        self._lock = threading.Lock()
        self._fetching = False
        self._value, good = fetch()
        self._due = context.clock.now() + good

    def __call__(self) -> T:
        if self._context.clock.now() >= self._due:
            self.renew()
        return self._value

    def renew(self) -> None:
        """Fetch soon, unless that is under way."""
        with self._lock:
            if self._fetching:
                return
            self._fetching = True
        try:
            self._context.executor.submit(self._run)
        except RuntimeError:  # no thread now
            self._fetching = False

    def _run(self) -> None:
        good = PATIENCE_S
        try:
            self._value, good = self._fetch()
        except (BackendError, OSError) as error:
            self._context.log.warning("credentials of %s: %s", self._context.tier, error)
        finally:
            self._due = self._context.clock.now() + good
            self._fetching = False


def aws_chain(profile: str, tier: str, /) -> tuple[str, Callable[[], tuple[Keys, float]]]:
    """Region and credentials as AWS tools find them: environment, files, SSO, web identity, container, instance.

    Raises:
        ConfigError: there are none.
    """
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
    from botocore.session import Session  # type: ignore[import-untyped]

    def fetch() -> tuple[Keys, float]:
        try:
            frozen = found.get_frozen_credentials()
        except BotoCoreError as error:
            raise Unavailable(f"no credentials: {error}") from error
        return Keys(frozen.access_key, frozen.secret_key, frozen.token or ""), CHAIN_S

    try:
        session = Session(profile=profile or None)
        region = session.get_config_variable("region")
        found = session.get_credentials()
    except BotoCoreError as error:
        raise ConfigError(f"credentials of tier {tier}: {error}") from error
    if found is None:
        raise ConfigError(
            f"tier {tier} has no credentials; set access_key and secret_key, a profile, or AWS_ACCESS_KEY_ID"
        )
    return region or "", fetch


def google_token() -> tuple[str, float]:
    """Token of the service account of this machine, from the metadata service."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            found = json.loads(answer.read(1 << 16))
        return str(found["access_token"]), max(PATIENCE_S, found["expires_in"] - ALLOWANCE_S)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"no token from the metadata service at {host}: {error}") from error


def express_session(bucket: Bucket, call: Call, /) -> tuple[Keys, float]:
    """Keys of a session with a directory bucket; they end after five minutes."""
    found = bucket.document(call, {"session": ""}).find("{*}Credentials")
    if found is None:
        raise Unavailable("the server gave no session")
    names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
    return Keys(*(text(found, name) for name in names)), SESSION_S
