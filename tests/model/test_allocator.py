"""Memory that a process keeps."""

import platform
import subprocess
import sys

import pytest

ASK_AGAIN = """
import resource, sys
import numpy as np
from mocha_model.allocator import keep_memory
if sys.argv[1] == "kept":
    keep_memory()
def ask():
    np.ones(1 << 23)  # 64 MiB, given back at once
ask()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    ask()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", ASK_AGAIN, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is told is glibc's allocator")
def test_memory_that_is_kept_does_not_have_to_be_asked_for_again():
    assert page_faults("kept") < page_faults("given back") / 20
