// Loaded before all libraries (LD_PRELOAD): from the n-th on, what a process writes below $DISK fails as on a full disk.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long from = -1, done = 0;

void disk_full_from(long n) {
  from = n;
  done = 0;
}
long disk_writes(void) { return done; }

static int below(const char* path) {
  const char* disk = getenv("DISK");
  return disk && (path[0] != '/' || !strncmp(path, disk, strlen(disk)));  // the process works in $DISK
}

static int refused(int counts) {
  if (!counts || (__atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST) < from || from < 0)) return 0;
  errno = ENOSPC;
  return 1;
}

static int open_below(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n <= 0 || path[0] != '/') return 0;  // a pipe or a socket
  path[n] = 0;
  return below(path);
}

// a file that is there can be opened on a full disk; a new one needs room
static int new_below(const char* path, int flags) { return (flags & O_CREAT) && below(path) && access(path, F_OK); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FD(type, name, parameters, ...) \
  type name parameters { return refused(open_below(fd)) ? -1 : REAL(name)(__VA_ARGS__); }
#define OPEN(name, parameters, ...)                               \
  int name parameters {                                           \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;     \
    va_end(rest);                                                 \
    return refused(new_below(path, flags)) ? -1 : REAL(name)(__VA_ARGS__, flags, mode); \
  }

ON_FD(ssize_t, write, (int fd, const void* data, size_t size), fd, data, size)
ON_FD(ssize_t, writev, (int fd, const struct iovec* data, int count), fd, data, count)
ON_FD(ssize_t, pwrite, (int fd, const void* data, size_t size, off_t at), fd, data, size, at)
ON_FD(ssize_t, pwrite64, (int fd, const void* data, size_t size, off64_t at), fd, data, size, at)
ON_FD(int, fallocate, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
ON_FD(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), fd, mode, at, size)
ON_FD(ssize_t, sendfile, (int fd, int in, off_t* at, size_t size), fd, in, at, size)
ON_FD(ssize_t, sendfile64, (int fd, int in, off64_t* at, size_t size), fd, in, at, size)
OPEN(open, (const char* path, int flags, ...), path)
OPEN(open64, (const char* path, int flags, ...), path)
OPEN(openat, (int fd, const char* path, int flags, ...), fd, path)
OPEN(openat64, (int fd, const char* path, int flags, ...), fd, path)
int mkdir(const char* path, mode_t mode) { return refused(below(path) && access(path, F_OK)) ? -1 : REAL(mkdir)(path, mode); }
