"""The soft cap of attention logits inside Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def softcapped(logits, softcap):
    """``softcap * tanh(logits / softcap)``, or the logits where there is no cap. By the exponential
    function, for there is no tanh that is fast and precise; off by some 1e-7 of the cap."""
    if softcap is None:
        return logits
    else:
        return softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * logits / softcap)))
