"""The rings of the main kernel: who waits for whom in a block."""

from dataclasses import dataclass

from ..device.ring import Ring


@dataclass(frozen=True)
class Rings:
    """Every ring of a block.

    Attributes:
        q, dout: tiles of Q with LSE and of dO with delta, from the load warp to the MMA warps.
        k, v: likewise, one tile each per item.
        dk: dK of an item, from the MMA warps to the load warp.
        ds: dS, among the MMA warps.
        dq: contributions to dQ, from the MMA warps to the reduce warp.
        item: the mailbox, from the load warp to all that follow items.
        item_granted: full once every ticket of an item that the block waits for is granted.
        granted, performed: slots of contributions, from the ticket warp to the reduce warp, and from there
            to the release warp. Both share one empty barrier.
        tile: complete dQ tiles to be converted, from the load warp to the MMA warps, which arrive at empty
            once they have no items any more.
    """

    q: Ring
    dout: Ring
    k: Ring
    v: Ring
    dk: Ring
    ds: Ring
    dq: Ring
    item: Ring
    granted: Ring
    performed: Ring
    item_granted: Ring
    tile: Ring
