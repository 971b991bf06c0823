"""A wall clock that jumps, for some processes only: a library that is loaded before libc.

The machine's own clock cannot be moved without all others noticing. What a process asks the kernel
to wait for is not moved: only what it reads.
"""

import shutil
import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
  static int fd = -2;
  char text[32];
  if (fd == -2) fd = getenv("FAULTS_CLOCK") ? open(getenv("FAULTS_CLOCK"), O_RDONLY) : -1;
  ssize_t n = fd < 0 ? 0 : pread(fd, text, sizeof text - 1, 0);
  if (n <= 0) return 0;
  text[n] = 0;
  return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, t);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += offset();
  return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
"""


class Clock:
    """The clock of the processes that are started with `environment`.

    Attributes:
        environment: variables for such a process.
    """

    def __init__(self, folder: Path) -> None:
        """Build the library, in a folder of its own."""
        folder.mkdir()
        source, library, self._file = folder / "clock.c", folder / "clock.so", folder / "offset"
        source.write_text(_SOURCE)
        self._file.write_text("0")
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        self.environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(self._file)}

    @staticmethod
    def available() -> bool:
        """Whether there is a C compiler."""
        return shutil.which("cc") is not None

    def set(self, seconds: int) -> None:
        """How far the clock is from the true time."""
        with self._file.open("r+") as file:  # no moment at which it is empty
            file.write(f"{seconds:<30d}")
