"""torch's pages of C++ frames do not reach the terminal; what a script prints does."""

from __future__ import annotations

from instep.launch.torch_logs import TorchLogFilter

PRINTED = """\
epoch 3
[rank0]:[E1116 19:09:59.808213046 ProcessGroupNCCL.cpp:612] [Rank 0] Collective WorkNCCL(SeqNum=39) raised: NCCL error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<56392>
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2770 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fc7abb7305d in libc10.so)
frame #1: <unknown function> + 0xecdb4 (0x7fc7d44ecdb4 in libstdc++.so.6)

[rank0]:[E1116 19:09:59.809774610 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective:
#0 all_gather from distributed_c10d.py:4079
#1 wrapper from c10d_logger.py:83

[rank0]:[E1116 19:10:00.705836866 ProcessGroupNCCL.cpp:1628] [Rank 0] preparing to dump debug info.
epoch 4

Last error: none
frame #1 of the video
[rank0]:[W1116 19:09:10.374387923 TCPStore.cpp:125] [c10d] recvValue failed: Failed to recv, got 0 bytes.
Exception raised from recvBytes at Utils.hpp:682 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fafd357305d in libc10.so)
<omitting python frames>

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 0] NCCL watchdog thread terminated with exception
Traceback (most recent call last):
[W1116 19:09:10.374 TensorImpl.cpp:12] Warning: a user's business
the end"""


def test_pages_are_hidden_and_nothing_else() -> None:
    filtered = TorchLogFilter()
    kept = [line for line in PRINTED.splitlines() if not filtered.hides(line)]
    assert kept == [
        *("epoch 3", "epoch 4", "", "Last error: none", "frame #1 of the video", "Traceback (most recent call last):"),
        *("[W1116 19:09:10.374 TensorImpl.cpp:12] Warning: a user's business", "the end"),
    ]
