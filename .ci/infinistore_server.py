"""Make `.lmcache-work/bin/infinistore-stubbed`: InfiniStore's real server on a pretended RDMA device, serving TCP.

The server opens an RDMA device before anything else, and there is none here. A stub of libibverbs shows it one
device whose queues cannot be made, which TCP does not need. The environment is its own: the server needs an old
uvloop, and its wheel is installed without the torch that it names and does not use.

    .venv/bin/python .ci/infinistore_server.py          make it
    .venv/bin/python .ci/infinistore_server.py --test   make it and run the tier's tests on it
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".lmcache-work/infinistore"
PROGRAM = ROOT / ".lmcache-work/bin/infinistore-stubbed"
WHEEL = ["infinistore==0.2.35"]
NEEDS = ["uvloop==0.21.0", "fastapi", "uvicorn", "numpy<3"]
HEADERS = ["libibverbs-dev", "libibverbs1"]
STUB = r"""
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#undef ibv_query_port
#undef ibv_reg_mr
static struct ibv_device device;
static struct ibv_context context;
static struct ibv_pd pd;
struct ibv_device **ibv_get_device_list(int *n) {
    struct ibv_device **list = calloc(2, sizeof *list);
    strcpy(device.name, "stub0");
    list[0] = &device;
    if (n) *n = 1;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }
struct ibv_context *ibv_open_device(struct ibv_device *d) {
    context.device = d;
    context.async_fd = -1;
    return &context;
}
int ibv_close_device(struct ibv_context *c) { return 0; }
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *compatible) {
    struct ibv_port_attr *a = (struct ibv_port_attr *)compatible;
    memset(a, 0, 48); // the part that every version of the header has
    a->state = IBV_PORT_ACTIVE;
    a->lid = 1;
    a->max_mtu = a->active_mtu = IBV_MTU_4096;
    a->gid_tbl_len = 1;
    a->link_layer = IBV_LINK_LAYER_INFINIBAND;
    return 0;
}
int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid) {
    memset(gid, 0, sizeof *gid);
    gid->raw[15] = 1;
    return 0;
}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { pd.context = c; return &pd; }
int ibv_dealloc_pd(struct ibv_pd *p) { return 0; }
struct ibv_mr *ibv_reg_mr(struct ibv_pd *p, void *addr, size_t length, int access) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    mr->pd = p; mr->addr = addr; mr->length = length; mr->lkey = mr->rkey = 1;
    return mr;
}
int ibv_dereg_mr(struct ibv_mr *mr) { free(mr); return 0; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
    struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
    int ends[2];
    if (pipe(ends)) return NULL;
    channel->context = c;
    channel->fd = ends[0];
    return channel;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *c) { return 0; }
struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *x, struct ibv_comp_channel *h, int v) { return NULL; }
int ibv_destroy_cq(struct ibv_cq *q) { return 0; }
struct ibv_qp *ibv_create_qp(struct ibv_pd *p, struct ibv_qp_init_attr *a) { return NULL; }
int ibv_destroy_qp(struct ibv_qp *q) { return 0; }
int ibv_modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int mask) { return -1; }
int ibv_get_cq_event(struct ibv_comp_channel *h, struct ibv_cq **q, void **x) { return -1; }
void ibv_ack_cq_events(struct ibv_cq *q, unsigned int n) {}
const char *ibv_wc_status_str(enum ibv_wc_status s) { return "stub"; }
"""
SERVE = """
import infinistore.server as server
server.prevent_oom = lambda: None  # it may not be asked for here
server.main()
"""


def have(*words: str) -> None:
    """Run a command, or stop with what it said."""
    ended = subprocess.run(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if ended.returncode:
        sys.exit(f"infinistore: failed: {' '.join(words)}\n{ended.stdout}")


def make() -> None:
    """Everything that is not there yet."""
    if PROGRAM.exists():
        return
    if not Path("/usr/include/infiniband/verbs.h").exists():
        have("apt-get", "update", "-qq")
        have("apt-get", "install", "-qq", "-y", "--no-install-recommends", *HEADERS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    python = str(FOLDER / "venv/bin/python")
    have(sys.executable, "-m", "venv", str(FOLDER / "venv"))
    have(python, "-m", "pip", "install", "-qq", "--no-deps", *WHEEL)
    have(python, "-m", "pip", "install", "-qq", *NEEDS)
    source, stub = FOLDER / "stub.c", FOLDER / "stub.so"
    source.write_text(STUB)
    (FOLDER / "serve.py").write_text(SERVE)
    have("gcc", "-shared", "-fPIC", "-w", "-o", str(stub), str(source))
    PROGRAM.write_text(
        f'#!/bin/sh\nLD_PRELOAD="{stub}" exec "{python}" "{FOLDER / "serve.py"}" "$@"\n'
    )
    PROGRAM.chmod(0o755)
    print("infinistore: made the server")


if __name__ == "__main__":
    os.chdir(ROOT)
    make()
    if "--test" in sys.argv[1:]:
        os.environ["LMCACHE_TEST_SERVICES"] = "infinistore"
        os.execv(
            sys.executable, [sys.executable, "-m", "pytest", "-q", "-m", "", "backends/infinistore"]
        )
