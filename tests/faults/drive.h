/* drive.h - a disk with a write cache, whose power can be cut: a file that a FUSE server in this
   program holds in memory, and a loop device over that file. Public domain or MIT, at your choice;
   see LICENSE.

       drive *d = drive_make();                     before the fork: campaign and server share it
       pid_t  server = drive_start(d, folder, "mine");      FOLDER/mine is the disk's content
       unshare(CLONE_NEWNS); fd = drive_attach(d, folder, device, sizeof device); "/dev/loop3" is
       the disk; mount it, close fd, write to it
       __atomic_store_n(&d->on, 0, ...);            or d->cut_at = 17: the power is cut at the 17th
                                                    request from here on
       (unmount)
       drive_lose(d, &seed, 512, &loss);            loses some of the writes since the last flush;
                                                     power on

   The kernel sees a block device with a volatile cache: file systems send it writes and flushes.
   The server keeps two copies of the content: `now`, which reads see, and `stable`, which has the
   writes up to the last flush, and a list of the writes since then. At the cut each write on that
   list is lost, kept, or torn into sectors of which some are kept. A real drive writes its cache in
   any order; what a subset of the writes leaves is what any order can leave. From the cut on every
   request fails, so that no sync after it can look like a success.

   Everything is cleaned up, however the programs end. The caller has a separate mount namespace,
   whose mounts end with its last process. The loop device is detached when its last user is gone.
   The server ends with its parent, and the kernel then fails every request. The caller must call
   unshare again after drive_start: the server may end last, and must not be the process whose end
   unmounts a file system that needs the server's answers. */
#ifndef DRIVE_H
#define DRIVE_H

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <linux/loop.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    DRIVE_BYTES = 64 << 20,
    DRIVE_CACHE = 256 << 20,
    DRIVE_WRITES = 1 << 16,
    DRIVE_PIECE = 1 << 20,
    DRIVE_NODE = 2
};

/* data: offset in `cache` */
typedef struct drive_write {
    int64_t offset, bytes, data;
} drive_write;

typedef struct drive {
    int on, served; /* atomic. served: 1 once the file can be opened */
    char name[60];  /* name of the file, which the loop device shows */
    /* atomic. requests: writes and flushes so far; cut_at: the request at which the power is cut,
       0: none */
    int64_t requests, cut_at;
    int at_flush; /* 1: the cut is at the first flush from cut_at on */
    int lies;     /* 1: flushes are acknowledged but not performed */
    /* 1: the list of writes overflowed, so the content after a cut is unknown */
    int full;
    int n_writes;
    int64_t used;
    drive_write writes[DRIVE_WRITES];
    char *stable, *now, *cache;
} drive;

typedef struct drive_loss {
    int writes, lost, torn;
} drive_loss;

static inline uint64_t drive_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline void *drive_shared(size_t bytes) {
    void *at = mmap(
        NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) abort();
    return at;
}

static inline drive *drive_make(void) {
    drive *d = (drive *)drive_shared(sizeof *d);
    d->stable = (char *)drive_shared(DRIVE_BYTES);
    d->now = (char *)drive_shared(DRIVE_BYTES);
    d->cache = (char *)drive_shared(DRIVE_CACHE);
    return d;
}

// ==== The server ================================================================================

/* Counts a write or a flush. Returns -1 if the power is off or is cut at this request. */
static inline int drive_count(drive *d, int flush) {
    int64_t n = __atomic_add_fetch(&d->requests, 1, __ATOMIC_SEQ_CST);
    int64_t at = __atomic_load_n(&d->cut_at, __ATOMIC_SEQ_CST);
    if (at > 0 && n >= at && (flush || !d->at_flush)) __atomic_store_n(&d->on, 0, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&d->on, __ATOMIC_SEQ_CST) ? 0 : -1;
}

/* The write at which the power is cut is on the list, too, because part of it may have reached the
   disk. */
static inline int drive_put(drive *d, const char *data, int64_t bytes, int64_t offset) {
    int was_on = __atomic_load_n(&d->on, __ATOMIC_SEQ_CST), answer = drive_count(d, 0);
    if (!was_on) return -EIO;
    if (offset < 0 || bytes > DRIVE_BYTES - offset) return -ENOSPC;
    if (d->n_writes == DRIVE_WRITES || bytes > DRIVE_CACHE - d->used)
        d->full = 1;
    else {
        drive_write w = { offset, bytes, d->used };
        d->writes[d->n_writes++] = w;
        memcpy(d->cache + d->used, data, (size_t)bytes);
        d->used += bytes;
    }
    memcpy(d->now + offset, data, (size_t)bytes);
    return answer == 0 ? (int)bytes : -EIO;
}

static inline int drive_flush(drive *d) {
    if (drive_count(d, 1) != 0) return -EIO;
    if (d->lies) return 0;
    for (int i = 0; i < d->n_writes; i++) {
        const drive_write *w = &d->writes[i];
        memcpy(d->stable + w->offset, d->cache + w->data, (size_t)w->bytes);
    }
    d->n_writes = 0;
    d->used = 0;
    return 0;
}

static inline void drive_attr(struct fuse_attr *a, uint64_t node) {
    memset(a, 0, sizeof *a);
    a->ino = node;
    a->mode = node == DRIVE_NODE ? S_IFREG | 0600 : S_IFDIR | 0700;
    a->nlink = 1;
    a->size = node == DRIVE_NODE ? DRIVE_BYTES : 0;
    a->blocks = a->size / 512;
    a->blksize = 4096;
}

static inline int drive_init(const struct fuse_init_in *i, struct fuse_init_out *o) {
    memset(o, 0, sizeof *o);
    o->major = FUSE_KERNEL_VERSION;
    o->minor = i->minor < FUSE_KERNEL_MINOR_VERSION ? i->minor : FUSE_KERNEL_MINOR_VERSION;
    o->max_readahead = i->max_readahead;
    o->flags = i->flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_MAX_PAGES);
    o->max_background = 64;
    o->congestion_threshold = 48;
    o->max_write = DRIVE_PIECE;
    o->max_pages = DRIVE_PIECE / 4096;
    o->time_gran = 1;
    return sizeof *o;
}

/* Answers one request of the kernel. Returns the bytes of the answer, or -errno. The kernel works
   without the requests that are missing here. */
static inline int drive_answer(
    drive *d, const struct fuse_in_header *in, const void *arg, char **out) {
    void *to = *out;
    switch (in->opcode) {
    case FUSE_INIT: return drive_init((const struct fuse_init_in *)arg, (struct fuse_init_out *)to);
    case FUSE_LOOKUP: {
        struct fuse_entry_out *o = (struct fuse_entry_out *)to;
        if (strcmp((const char *)arg, d->name) != 0) return -ENOENT;
        memset(o, 0, sizeof *o);
        o->nodeid = DRIVE_NODE;
        o->entry_valid = o->attr_valid = 1u << 30;
        drive_attr(&o->attr, DRIVE_NODE);
        return sizeof *o;
    }
    case FUSE_GETATTR: {
        struct fuse_attr_out *o = (struct fuse_attr_out *)to;
        memset(o, 0, sizeof *o);
        o->attr_valid = 1u << 30;
        drive_attr(&o->attr, in->nodeid);
        return sizeof *o;
    }
    case FUSE_OPEN: {
        struct fuse_open_out *o = (struct fuse_open_out *)to;
        memset(o, 0, sizeof *o);
        /* no page cache between the loop device and this program */
        o->open_flags = FOPEN_DIRECT_IO;
        return sizeof *o;
    }
    case FUSE_READ: {
        const struct fuse_read_in *r = (const struct fuse_read_in *)arg;
        if (!__atomic_load_n(&d->on, __ATOMIC_SEQ_CST)) return -EIO;
        if (r->offset >= DRIVE_BYTES) return 0;
        *out = d->now + r->offset;
        return r->size < DRIVE_BYTES - r->offset ? (int)r->size : (int)(DRIVE_BYTES - r->offset);
    }
    case FUSE_WRITE: {
        const struct fuse_write_in *w = (const struct fuse_write_in *)arg;
        struct fuse_write_out *o = (struct fuse_write_out *)to;
        int wrote = drive_put(d, (const char *)(w + 1), w->size, (int64_t)w->offset);
        memset(o, 0, sizeof *o);
        o->size = (uint32_t)wrote;
        return wrote < 0 ? wrote : (int)sizeof *o;
    }
    case FUSE_FSYNC: return drive_flush(d);
    case FUSE_RELEASE: return 0;
    default: return -ENOSYS;
    }
}

/* Serves until the folder is unmounted or the parent ends. Does not return. */
static inline void drive_serve(drive *d, const char *folder) {
    size_t bytes = DRIVE_PIECE + 8192;
    char *in = (char *)malloc(bytes), *room = (char *)malloc(4096), options[100];
    int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fd);
    if (!in || !room || fd < 0 ||
        mount("drive", folder, "fuse", MS_NOSUID | MS_NODEV, options) != 0) {
        __atomic_store_n(&d->served, -(errno ? errno : ENOMEM), __ATOMIC_SEQ_CST);
        _exit(1);
    }
    __atomic_store_n(&d->served, 1, __ATOMIC_SEQ_CST);
    for (;;) {
        ssize_t got = read(fd, in, bytes);
        if (got < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
        if (got < (ssize_t)sizeof(struct fuse_in_header)) _exit(0);
        const struct fuse_in_header *request = (const struct fuse_in_header *)(void *)in;
        if (request->opcode == FUSE_FORGET || request->opcode == FUSE_BATCH_FORGET ||
            request->opcode == FUSE_INTERRUPT)
            continue; /* these requests need no answer */
        char *out = room;
        int answer = drive_answer(d, request, request + 1, &out);
        struct fuse_out_header head = { sizeof head, 0, request->unique };
        if (answer < 0)
            head.error = answer;
        else
            head.len += (uint32_t)answer;
        struct iovec part[2] = { { &head, sizeof head }, { out, answer > 0 ? (size_t)answer : 0 } };
        if (writev(fd, part, answer > 0 ? 2 : 1) < 0 && errno != ENOENT) _exit(1);
    }
}

/* Starts the server in a child process that ends with this process. Returns -1 with errno if FUSE
   is not available. */
static inline pid_t drive_start(drive *d, const char *folder, const char *name) {
    snprintf(d->name, sizeof d->name, "%s", name);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /* file systems wait for the server when memory is short */
        prctl(57 /* PR_SET_IO_FLUSHER */, 1, 0, 0, 0);
        if (getppid() == parent) drive_serve(d, folder);
        _exit(1);
    }
    while (pid > 0 && !__atomic_load_n(&d->served, __ATOMIC_SEQ_CST)) usleep(500);
    if (pid < 0 || d->served > 0) return pid;
    errno = -d->served;
    return -1;
}

// ==== Calls of the campaign =====================================================================

/* Attaches a free loop device to the disk and returns a descriptor, or -1 with errno. The device is
   detached when its last user (this descriptor or a mount) is gone. */
static inline int drive_attach(const drive *d, const char *folder, char *device, size_t bytes) {
    char path[300];
    struct loop_config how;
    snprintf(path, sizeof path, "%s/%s", folder, d->name);
    memset(&how, 0, sizeof how);
    how.info.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO;
    int disk = open(path, O_RDWR | O_CLOEXEC),
        control = open("/dev/loop-control", O_RDWR | O_CLOEXEC), fd = -1;
    /* another program may take the free device first */
    for (int i = 0; i < 50 && fd < 0 && disk >= 0 && control >= 0; i++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);
        snprintf(device, bytes, "/dev/loop%d", n);
        how.fd = (uint32_t)disk;
        fd = n < 0 ? -1 : open(device, O_RDWR | O_CLOEXEC);
        if (n < 0 || (fd < 0 && errno != ENOENT)) break;
        if (fd >= 0 && ioctl(fd, LOOP_CONFIGURE, &how) != 0) {
            int why = errno;
            close(fd);
            fd = -1;
            errno = why;
            if (why != EBUSY) break;
        }
        if (fd < 0) usleep(2000);
    }
    int why = errno;
    if (disk >= 0) close(disk);
    if (control >= 0) close(control);
    errno = why;
    return fd;
}

/* 1 if the kernel sends flushes to the device. */
static inline int drive_flushes(const char *device) {
    char path[100], text[40] = "";
    snprintf(path, sizeof path, "/sys/block/%s/queue/write_cache", device + strlen("/dev/"));
    FILE *f = fopen(path, "r");
    if (f && !fgets(text, sizeof text, f)) text[0] = 0;
    if (f) fclose(f);
    return strncmp(text, "write back", 10) == 0;
}

/* Call after the cut, when nothing uses the disk any more: loses some of the writes since the last
   flush, and tears some at sectors of this size. Then the power is on again. */
static inline void drive_lose(drive *d, uint64_t *state, int sector, drive_loss *loss) {
    /* probabilities in quarters */
    unsigned kept = (unsigned)(drive_random(state) % 5), torn = (unsigned)(drive_random(state) % 3);
    memset(loss, 0, sizeof *loss);
    for (int i = 0; i < d->n_writes; i++) {
        const drive_write *w = &d->writes[i];
        uint64_t dice = drive_random(state);
        int there = dice % 4 < kept, tears = (dice >> 8) % 4 < torn && w->bytes > sector;
        loss->writes++;
        if (tears)
            loss->torn++;
        else if (!there)
            loss->lost++;
        for (int64_t at = 0; at < w->bytes; at += sector) {
            int64_t n = w->bytes - at < sector ? w->bytes - at : sector;
            if (tears ? (int)(drive_random(state) & 1) : there)
                memcpy(d->stable + w->offset + at, d->cache + w->data + at, (size_t)n);
        }
    }
    for (int i = 0; i < d->n_writes; i++)
        memcpy(d->now + d->writes[i].offset, d->stable + d->writes[i].offset,
            (size_t)d->writes[i].bytes);
    d->n_writes = 0;
    d->used = d->requests = d->cut_at = 0;
    __atomic_store_n(&d->on, 1, __ATOMIC_SEQ_CST);
}

/* Makes a new disk with the content of a file. Returns 0 if the file cannot be read. */
static inline int drive_load(drive *d, const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = 0, got = 0;
    if (madvise(d->stable, DRIVE_BYTES, MADV_REMOVE) != 0) memset(d->stable, 0, DRIVE_BYTES);
    if (madvise(d->now, DRIVE_BYTES, MADV_REMOVE) != 0) memset(d->now, 0, DRIVE_BYTES);
    while (fd >= 0 && n < DRIVE_BYTES) { /* keeps holes, because most of the image is empty */
        off_t data = lseek(fd, n, SEEK_DATA), end = data < 0 ? -1 : lseek(fd, data, SEEK_HOLE);
        if (data < 0 || end < 0) break;
        got = pread(fd, d->stable + data, (size_t)(end - data), data);
        if (got <= 0) break;
        memcpy(d->now + data, d->stable + data, (size_t)got);
        n = data + got;
    }
    if (fd >= 0) close(fd);
    d->n_writes = 0;
    d->used = d->requests = d->cut_at = 0;
    d->lies = d->full = d->at_flush = 0;
    __atomic_store_n(&d->on, 1, __ATOMIC_SEQ_CST);
    return fd >= 0 && got >= 0;
}

#endif
