"""Who offers object stores: addresses, credentials and words of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from lmcache_backend_s3 import credentials, opening, sign
from lmcache_backend_s3.azure import Container
from lmcache_backend_s3.backend import ObjectBackend
from lmcache_backend_s3.bucket import Bucket
from lmcache_backend_s3.config import Addressing, AzConfig, GSConfig, S3Config
from lmcache_backend_s3.credentials import Renewed
from lmcache_backend_s3.sign import V4, Bearer, Dialect, Keys, SharedKey, Signer
from lmcache_backend_s3.transport import Call, Transport
from lmcache_core.spi import ConfigError


class S3Backend(ObjectBackend):
    """Values in a bucket of S3 or of a server that speaks it; directory buckets (S3 Express) too."""

    config_type = S3Config
    config: S3Config

    @classmethod
    def testing_config(cls) -> S3Config:
        """A server of this process, which ends with it."""
        from lmcache_backend_s3.serving import shared_server

        return shared_server().config()

    def make_bucket(self) -> tuple[Transport, Bucket]:
        config, context = self.config, self.context
        region = (
            config.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        )
        keys: Callable[[], Keys]
        if config.access_key:
            secrets = (config.access_key, config.secret_key, config.session_token)
            fixed = Keys(*(secret.reveal() for secret in secrets))
            keys = lambda: fixed  # noqa: E731
        else:
            configured, fetch = credentials.aws_chain(config.profile, context.tier)
            region, keys = region or configured, Renewed(fetch, context)
        region = region or "us-east-1"
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        service = f"s3express-{config.zone}" if config.zone else "s3"
        endpoint = config.endpoint or f"https://{config.host or f'{service}.{region}.{domain}'}"
        virtual = config.addressing is Addressing.VIRTUAL or (
            config.addressing is Addressing.AUTO and not config.endpoint
            and (bool(config.zone) or "." not in config.bucket)
        )  # fmt: skip
        if virtual:
            endpoint = endpoint.replace("://", f"://{config.bucket}.", 1)
        root = "" if virtual else f"/{config.bucket}"
        transport = opening.connect(config, endpoint, context)

        def bucket(keys: Callable[[], Keys], dialect: Dialect) -> Bucket:
            signer = V4(region, keys, context.clock.wall, dialect)
            expired = keys.renew if isinstance(keys, Renewed) else lambda: None
            return Bucket(transport, signer, root, expired=expired)

        if not config.zone:
            return transport, bucket(keys, sign.AWS)
        plain = bucket(keys, replace(sign.AWS, service=sign.EXPRESS.service))
        session_keys = Renewed(lambda: credentials.express_session(plain, Call()), context)
        return transport, bucket(session_keys, sign.EXPRESS)


class GSBackend(ObjectBackend):
    """Values in a bucket of Google Cloud Storage, by its XML interface."""

    config_type = GSConfig
    config: GSConfig

    def make_bucket(self) -> tuple[Transport, Bucket]:
        config, context = self.config, self.context
        signer: Signer
        expired: Callable[[], None] = lambda: None  # noqa: E731
        if config.access_key:
            keys = Keys(config.access_key.reveal(), config.secret_key.reveal())
            signer = V4("auto", lambda: keys, context.clock.wall, sign.GOOGLE)
        else:
            token = Renewed(credentials.google_token, context)
            signer, expired = Bearer(token), token.renew
        endpoint = config.endpoint or "https://storage.googleapis.com"
        transport = opening.connect(config, endpoint, context)
        only_new = ("x-goog-if-generation-match", "0")
        return transport, Bucket(transport, signer, f"/{config.bucket}", only_new, expired)


class AzBackend(ObjectBackend):
    """Values as block blobs in a container of Azure Blob Storage."""

    config_type = AzConfig
    in_parts = False
    config: AzConfig

    def make_bucket(self) -> tuple[Transport, Bucket]:
        config = self.config
        endpoint = config.endpoint or f"https://{config.account}.blob.core.windows.net"
        key, sas = config.account_key.reveal(), config.sas_token.reveal()
        try:
            signer = SharedKey(config.account, key, sas, self.context.clock.wall)
        except ValueError as error:
            raise ConfigError(
                f"account_key of tier {self.context.tier} is no key: {error}"
            ) from error
        transport = opening.connect(config, endpoint, self.context)
        # The emulator is reached by an address, which cannot name an account.
        numbered = transport.host == "localhost" or transport.host.replace(".", "").isdigit()
        root = f"/{config.account}/{config.bucket}" if numbered else f"/{config.bucket}"
        return transport, Container(transport, signer, root)
