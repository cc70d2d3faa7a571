/* disk_sim.h - a disk in memory, for tests: a dt_io table whose folders several ranks can use at
   the same time. A test can cut its power afterwards at any point and make its calls fail.

       disk      d;
       disk_seat seat = { &d, "", 0, 0, 0 };
       dt_io     io = disk_io(&seat);
       disk_make(&d);
       ... a job works with io ...
       disk image;
       disk_cut(&image, &d, 17, seed);     the disk after a power failure after 17 of the d.n_ops
                                           changes
       disk_free(&image);
       disk_free(&d);

   A power cut keeps less than on any real disk, as if each descriptor were the cache of a different
   machine. Durable is:

       in a file     a write or change of length through a descriptor, once an fsync of that
                     descriptor has returned. Before that all, none or some of the write's sectors
                     may survive, in any order relative to writes of other descriptors. Bytes
                     within the length that were not written read as zeros.
       in a folder   an added, changed or removed name, once an fsync of the folder has returned.
                     Before that each change may survive or not; changes of one name survive in
                     their order. A rename is atomic.

   Include it after dt_tensor.h. */
#ifndef DISK_SIM_H
#define DISK_SIM_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DISK_ROOT = 0, DISK_NAME = 64, DISK_FDS = 64, DISK_SECTOR = 512, DISK_FD_BASE = 100 };
enum { DISK_ENTER = 0, DISK_RENAME, DISK_REMOVE, DISK_WRITE, DISK_RESIZE, DISK_SYNC, DISK_MARK };

/* How counted calls fail. */
enum {
    DISK_FAILS = 1,
    DISK_SHORT /* moves one byte */,
    DISK_INTERRUPTED /* moves nothing: EINTR */
};
typedef struct disk_fault {
    int how;  /* 0: none */
    int rank; /* the rank whose calls fail */
    long at;  /* number of the failing call, from 1 */
    /* 1: all later calls fail, too (DISK_INTERRUPTED: every second one, because callers retry) */
    int sticky;
    int reason; /* errno of DISK_FAILS */
    /* bytes that all counting seats may write before ENOSPC; -1: no limit */
    int64_t room;
} disk_fault;

typedef struct disk_node {
    int folder;
    unsigned char *data;
    size_t size, room;
    int lock; /* serial number of the descriptor that holds the lock; 0: none */
} disk_node;

typedef struct disk_entry {
    int folder, node;
    char name[DISK_NAME];
} disk_entry;
typedef struct disk_fd {
    int used, node, writable, serial;
    char path[192];
} disk_fd;

typedef struct disk_op {
    /* node: the file, or the folder whose names change; serial: the descriptor's */
    int kind, node, serial;
    int child;
    /* data: offset of the bytes in disk.bytes. DISK_RESIZE: `at` is the new size; DISK_MARK: `at`
       is the value that the test noted */
    size_t at, bytes, data;
    char name[DISK_NAME], to[DISK_NAME];
} disk_op;

typedef struct disk {
    pthread_mutex_t lock;
    disk_node *node;      /* (n_nodes) 0: the root */
    disk_entry *entry;    /* (n_entries) */
    disk_op *op;          /* (n_ops) every change since disk_make */
    unsigned char *bytes; /* (n_bytes) the written bytes */
    int n_nodes, node_room, n_entries, entry_room;
    long n_ops, op_room;
    size_t n_bytes, byte_room;
    /* number of changes that no cut can lose: those made before the last power failure */
    long settled;
    disk_fd fd[DISK_FDS];
    int open, serials; /* open descriptors; all descriptors ever opened */
    disk_fault fault;
    int hits;           /* calls that failed by an injected fault */
    const char *hit;    /* the first such call: its function, */
    char hit_path[192]; /* its path (of a descriptor: the path it was opened with), */
    int hit_writable;   /* and 1 if opened for writing */
    int64_t written;    /* bytes written by counting seats */
} disk;

/* A rank's access to the disk; its dt_io.user points here. */
typedef struct disk_seat {
    disk *disk;
    const char *root; /* prefix of every path: "" or an existing folder such as "m1/" */
    int rank;
    int counting; /* 1: its calls are counted, and fail if disk.fault says so */
    long calls;
} disk_seat;

static inline void *disk_grow(void *array, long have, long want, size_t size) {
    if (want <= have) return array;
    array = realloc(array, (size_t)want * size);
    if (!array) abort();
    memset((char *)array + (size_t)have * size, 0, (size_t)(want - have) * size);
    return array;
}

/* ---- changes, and their log: the caller holds the lock or is the only thread ---- */

static inline disk_op *disk_log(disk *d, int kind, int node, int serial) {
    if (d->n_ops == d->op_room) {
        long want = d->op_room ? 2 * d->op_room : 64;
        d->op = (disk_op *)disk_grow(d->op, d->op_room, want, sizeof *d->op);
        d->op_room = want;
    }
    disk_op *op = &d->op[d->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->node = node;
    op->serial = serial;
    return op;
}

static inline int disk_node_new(disk *d, int folder) {
    if (d->n_nodes == d->node_room) {
        int want = d->node_room ? 2 * d->node_room : 16;
        d->node = (disk_node *)disk_grow(d->node, d->node_room, want, sizeof *d->node);
        d->node_room = want;
    }
    memset(&d->node[d->n_nodes], 0, sizeof d->node[0]);
    d->node[d->n_nodes].folder = folder;
    return d->n_nodes++;
}

static inline int disk_entry_at(const disk *d, int folder, const char *name) {
    for (int i = 0; i < d->n_entries; i++)
        if (d->entry[i].folder == folder && strcmp(d->entry[i].name, name) == 0) return i;
    return -1;
}

static inline void disk_drop(disk *d, int folder, const char *name, int child) {
    int i = disk_entry_at(d, folder, name);
    if (i >= 0 && d->entry[i].node == child) d->entry[i] = d->entry[--d->n_entries];
}

static inline void disk_enter(disk *d, int folder, const char *name, int child) {
    int i = disk_entry_at(d, folder, name);
    if (i < 0) {
        if (d->n_entries == d->entry_room) {
            int want = d->entry_room ? 2 * d->entry_room : 16;
            d->entry = (disk_entry *)disk_grow(d->entry, d->entry_room, want, sizeof *d->entry);
            d->entry_room = want;
        }
        i = d->n_entries++;
        d->entry[i].folder = folder;
        snprintf(d->entry[i].name, DISK_NAME, "%s", name);
    }
    d->entry[i].node = child;
    snprintf(disk_log(d, DISK_ENTER, folder, 0)->name, DISK_NAME, "%s", name);
    d->op[d->n_ops - 1].child = child;
}

static inline void disk_size_to(disk_node *f, size_t bytes) {
    if (bytes > f->room) {
        f->data = (unsigned char *)disk_grow(f->data, (long)f->room, (long)bytes, 1);
        f->room = bytes;
    }
    if (bytes < f->size) memset(f->data + bytes, 0, f->size - bytes);
    f->size = bytes;
}

static inline void disk_resize_to(disk *d, int node, int serial, size_t bytes) {
    disk_size_to(&d->node[node], bytes);
    disk_log(d, DISK_RESIZE, node, serial)->at = bytes;
}

static inline void disk_log_write(
    disk *d, int node, int serial, const void *from, size_t bytes, size_t at) {
    if (d->n_bytes + bytes > d->byte_room) {
        size_t want = 2 * (d->n_bytes + bytes);
        d->bytes = (unsigned char *)disk_grow(d->bytes, (long)d->byte_room, (long)want, 1);
        d->byte_room = want;
    }
    disk_op *op = disk_log(d, DISK_WRITE, node, serial);
    op->at = at;
    op->bytes = bytes;
    op->data = d->n_bytes;
    memcpy(d->bytes + d->n_bytes, from, bytes);
    d->n_bytes += bytes;
}

static inline void disk_write_at(
    disk *d, int node, int serial, const void *from, size_t bytes, size_t at) {
    disk_node *f = &d->node[node];
    if (bytes == 0) return;
    disk_log_write(d, node, serial, from, bytes, at);
    if (at + bytes > f->size) disk_size_to(f, at + bytes);
    memcpy(f->data + at, from, bytes);
}

static inline void disk_make(disk *d) {
    memset(d, 0, sizeof *d);
    pthread_mutex_init(&d->lock, NULL);
    d->fault.room = -1;
    disk_node_new(d, 1);
}

static inline void disk_free(disk *d) {
    for (int i = 0; i < d->n_nodes; i++) free(d->node[i].data);
    free(d->node);
    free(d->entry);
    free(d->op);
    free(d->bytes);
    pthread_mutex_destroy(&d->lock);
    memset(d, 0, sizeof *d);
}

/* ---- paths ---- */

/* Returns the folder that contains a path's last name, and the name ("" for the root itself); -1
   with errno on error. */
static inline int disk_parent(
    const disk *d, const char *root, const char *path, char name[DISK_NAME]) {
    char whole[256];
    int folder = DISK_ROOT;
    const char *p = whole;
    name[0] = 0;
    if ((size_t)snprintf(whole, sizeof whole, "%s%s", root, path) >= sizeof whole)
        return errno = ENAMETOOLONG, -1;
    if (!*path) return errno = ENOENT, -1;
    while (*p) {
        size_t n = strcspn(p, "/");
        if (n >= DISK_NAME) return errno = ENAMETOOLONG, -1;
        if (n > 0 && !(n == 1 && p[0] == '.')) {
            if (name[0]) {
                int i = disk_entry_at(d, folder, name);
                if (i < 0) return errno = ENOENT, -1;
                folder = d->entry[i].node;
                if (!d->node[folder].folder) return errno = ENOTDIR, -1;
            }
            memcpy(name, p, n);
            name[n] = 0;
        }
        p += n;
        p += strspn(p, "/");
    }
    return folder;
}

/* Returns the node at a path, or -1 with errno. */
static inline int disk_find(const disk *d, const char *root, const char *path) {
    char name[DISK_NAME];
    int folder = disk_parent(d, root, path, name);
    if (folder < 0 || !name[0]) return folder;
    int i = disk_entry_at(d, folder, name);
    return i < 0 ? (errno = ENOENT, -1) : d->entry[i].node;
}

static inline int disk_holds(const disk *d, int folder) {
    int n = 0;
    for (int i = 0; i < d->n_entries; i++) n += d->entry[i].folder == folder;
    return n;
}

/* ---- calls ---- */

/* Counts a call and takes the lock. Returns 0, or the kind of fault for this call. */
static inline int disk_call(disk_seat *s, const char *what, const char *path, int fd, int moves) {
    disk *d = s->disk;
    const disk_fault *f = &d->fault;
    pthread_mutex_lock(&d->lock);
    errno = 0;
    if (!s->counting) return 0;
    long n = ++s->calls - f->at;
    int hit = f->how != 0 && f->rank == s->rank && f->at > 0 && (n == 0 || (n > 0 && f->sticky));
    if (f->how == DISK_INTERRUPTED && n % 2 != 0) hit = 0;
    if (f->how != DISK_FAILS && !moves) hit = 0;
    if (!hit) return 0;
    if (d->hits++ == 0) {
        d->hit = what;
        snprintf(d->hit_path, sizeof d->hit_path, "%s",
            path      ? path
            : fd >= 0 ? d->fd[fd].path
                      : "");
        d->hit_writable = fd >= 0 ? d->fd[fd].writable : 0;
    }
    errno = f->how == DISK_INTERRUPTED ? EINTR : f->reason;
    return f->how;
}

static inline int64_t disk_done(disk_seat *s, int64_t result) {
    int reason = errno;
    pthread_mutex_unlock(&s->disk->lock);
    errno = reason;
    return result;
}

static inline int disk_fails(int reason) { return errno = reason, -1; }

/* Index in disk.fd of a descriptor. Descriptor numbers start at DISK_FD_BASE, so that no index
   passes as a descriptor by mistake. */
static inline int disk_slot(const disk *d, int fd) {
    int i = fd - DISK_FD_BASE;
    return i >= 0 && i < DISK_FDS && d->fd[i].used ? i : -1;
}

static inline int disk_open_locked(disk_seat *s, const char *path, int mode) {
    disk *d = s->disk;
    char name[DISK_NAME];
    int write = mode != DT_IO_READ;
    int folder = disk_parent(d, s->root, path, name), i = 0;
    if (folder < 0) return -1;
    int at = name[0] ? disk_entry_at(d, folder, name) : -1;
    int node = !name[0] ? DISK_ROOT : at >= 0 ? d->entry[at].node : -1;
    if (node < 0 && (mode == DT_IO_READ || mode == DT_IO_WRITE)) return disk_fails(ENOENT);
    if (node >= 0 && (mode == DT_IO_CREATE || mode == DT_IO_PRIVATE)) return disk_fails(EEXIST);
    if (node >= 0 && write && d->node[node].folder) return disk_fails(EISDIR);
    if (node >= 0 && !d->node[node].folder && path[strlen(path) - 1] == '/')
        return disk_fails(ENOTDIR);
    while (i < DISK_FDS && d->fd[i].used) i++;
    if (i == DISK_FDS) return disk_fails(EMFILE);
    if (node < 0) disk_enter(d, folder, name, node = disk_node_new(d, 0));
    d->fd[i].used = 1;
    d->fd[i].node = node;
    d->fd[i].writable = write;
    d->fd[i].serial = ++d->serials;
    snprintf(d->fd[i].path, sizeof d->fd[i].path, "%s", path);
    d->open++;
    return DISK_FD_BASE + i;
}

static inline int disk_open(void *user, const char *path, int mode) {
    disk_seat *s = (disk_seat *)user;
    int spoiled = disk_call(s, "open", path, -1, 0);
    return (int)disk_done(s, spoiled ? -1 : disk_open_locked(s, path, mode));
}

static inline int disk_close(void *user, int fd) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd), spoiled = disk_call(s, "close", NULL, i, 0);
    if (i < 0) return (int)disk_done(s, disk_fails(EBADF));
    disk_node *n = &s->disk->node[s->disk->fd[i].node];
    if (n->lock == s->disk->fd[i].serial) n->lock = 0;
    s->disk->fd[i].used = 0; /* closed even if close fails, as on Linux */
    s->disk->open--;
    return (int)disk_done(s, spoiled ? -1 : 0);
}

static inline int64_t disk_size(void *user, int fd) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd);
    if (disk_call(s, "size", NULL, i, 0)) return disk_done(s, -1);
    if (i < 0) return disk_done(s, disk_fails(EBADF));
    const disk_node *n = &s->disk->node[s->disk->fd[i].node];
    return disk_done(s, n->folder ? disk_fails(EISDIR) : (int64_t)n->size);
}

static inline int64_t disk_pread(void *user, int fd, void *buf, size_t bytes, int64_t offset) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd), spoiled = disk_call(s, "pread", NULL, i, 1);
    if (spoiled == DISK_SHORT && bytes > 1)
        bytes = 1;
    else if (spoiled && spoiled != DISK_SHORT)
        return disk_done(s, -1);
    if (i < 0 || offset < 0) return disk_done(s, disk_fails(i < 0 ? EBADF : EINVAL));
    const disk_node *n = &s->disk->node[s->disk->fd[i].node];
    if (n->folder) return disk_done(s, disk_fails(EISDIR));
    if ((uint64_t)offset >= n->size) return disk_done(s, 0);
    if (bytes > n->size - (size_t)offset) bytes = n->size - (size_t)offset;
    memcpy(buf, n->data + offset, bytes);
    return disk_done(s, (int64_t)bytes);
}

static inline int64_t disk_pwrite(
    void *user, int fd, const void *buf, size_t bytes, int64_t offset) {
    disk_seat *s = (disk_seat *)user;
    disk *d = s->disk;
    int i = disk_slot(d, fd), spoiled = disk_call(s, "pwrite", NULL, i, 1);
    if (spoiled == DISK_SHORT && bytes > 1)
        bytes = 1;
    else if (spoiled && spoiled != DISK_SHORT)
        return disk_done(s, -1);
    if (i < 0 || !d->fd[i].writable || offset < 0)
        return disk_done(s, disk_fails(offset < 0 ? EINVAL : EBADF));
    if (s->counting && d->fault.room >= 0 && (int64_t)bytes > d->fault.room - d->written) {
        if (bytes && d->written >= d->fault.room)
            return d->hits++, disk_done(s, disk_fails(ENOSPC));
        bytes = (size_t)(d->fault.room - d->written);
    }
    if (s->counting) d->written += (int64_t)bytes;
    disk_write_at(d, d->fd[i].node, d->fd[i].serial, buf, bytes, (size_t)offset);
    return disk_done(s, (int64_t)bytes);
}

static inline int disk_fsync(void *user, int fd) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd);
    if (disk_call(s, "fsync", NULL, i, 0)) return (int)disk_done(s, -1);
    if (i < 0) return (int)disk_done(s, disk_fails(EBADF));
    disk_log(s->disk, DISK_SYNC, s->disk->fd[i].node, s->disk->fd[i].serial);
    return (int)disk_done(s, 0);
}

static inline int disk_rename_locked(disk_seat *s, const char *from, const char *to) {
    disk *d = s->disk;
    char name[DISK_NAME], name_to[DISK_NAME];
    int folder = disk_parent(d, s->root, from, name), folder_to = folder;
    if (folder < 0 || (folder_to = disk_parent(d, s->root, to, name_to)) < 0) return -1;
    int i = name[0] ? disk_entry_at(d, folder, name) : -1, j = disk_entry_at(d, folder_to, name_to);
    if (i < 0) return disk_fails(name[0] ? ENOENT : EBUSY);
    if (folder != folder_to) return disk_fails(EXDEV);
    int child = d->entry[i].node, old = j >= 0 ? d->entry[j].node : -1;
    if (old == child) return 0;
    if (old >= 0 && d->node[old].folder != d->node[child].folder)
        return disk_fails(d->node[old].folder ? EISDIR : ENOTDIR);
    if (old >= 0 && d->node[old].folder && disk_holds(d, old)) return disk_fails(ENOTEMPTY);
    if (old >= 0) disk_drop(d, folder, name_to, old);
    disk_entry *e = &d->entry[disk_entry_at(d, folder, name)];
    snprintf(e->name, DISK_NAME, "%s", name_to);
    disk_op *op = disk_log(d, DISK_RENAME, folder, 0);
    op->child = child;
    snprintf(op->name, DISK_NAME, "%s", name);
    snprintf(op->to, DISK_NAME, "%s", name_to);
    return 0;
}

static inline int disk_rename(void *user, const char *from, const char *to) {
    disk_seat *s = (disk_seat *)user;
    return (int)disk_done(
        s, disk_call(s, "rename", from, -1, 0) ? -1 : disk_rename_locked(s, from, to));
}

static inline int disk_resize(void *user, int fd, int64_t bytes) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd);
    if (disk_call(s, "resize", NULL, i, 0)) return (int)disk_done(s, -1);
    if (i < 0 || !s->disk->fd[i].writable) return (int)disk_done(s, disk_fails(EBADF));
    disk_resize_to(s->disk, s->disk->fd[i].node, s->disk->fd[i].serial, (size_t)bytes);
    return (int)disk_done(s, 0);
}

static inline int disk_remove_locked(disk_seat *s, const char *path, int is_folder) {
    disk *d = s->disk;
    char name[DISK_NAME];
    int folder = disk_parent(d, s->root, path, name);
    if (folder < 0) return -1;
    int i = name[0] ? disk_entry_at(d, folder, name) : -1, child = i >= 0 ? d->entry[i].node : -1;
    if (i < 0) return disk_fails(name[0] ? ENOENT : EBUSY);
    if (d->node[child].folder != is_folder) return disk_fails(is_folder ? ENOTDIR : EISDIR);
    if (is_folder && disk_holds(d, child)) return disk_fails(ENOTEMPTY);
    disk_drop(d, folder, name, child);
    disk_op *op = disk_log(d, DISK_REMOVE, folder, 0);
    op->child = child;
    snprintf(op->name, DISK_NAME, "%s", name);
    return 0;
}

static inline int disk_remove(void *user, const char *path) {
    disk_seat *s = (disk_seat *)user;
    int spoiled = disk_call(s, "remove", path, -1, 0);
    return (int)disk_done(s, spoiled ? -1 : disk_remove_locked(s, path, 0));
}

static inline int disk_remove_folder(
    void *user, const char *path, const char *const *names, int n) {
    disk_seat *s = (disk_seat *)user;
    char file[256];
    int failed = disk_call(s, "remove_folder", path, -1, 0);
    for (int i = 0; i < n && !failed; i++) {
        snprintf(file, sizeof file, "%s/%s", path, names[i]);
        failed = disk_remove_locked(s, file, 0) != 0 && errno != ENOENT;
    }
    return (int)disk_done(s, failed ? -1 : disk_remove_locked(s, path, 1));
}

static inline int disk_make_locked(disk_seat *s, const char *path) {
    disk *d = s->disk;
    char name[DISK_NAME];
    int folder = disk_parent(d, s->root, path, name);
    if (folder < 0) return -1;
    if (!name[0] || disk_entry_at(d, folder, name) >= 0) return disk_fails(EEXIST);
    disk_enter(d, folder, name, disk_node_new(d, 1));
    return 0;
}

static inline int disk_mkdir(void *user, const char *path) {
    disk_seat *s = (disk_seat *)user;
    return (int)disk_done(s, disk_call(s, "make", path, -1, 0) ? -1 : disk_make_locked(s, path));
}

/* The names are copied first, because `each` may call the table. The newest names come first;
   callers must not rely on an order. */
static inline int disk_list(
    void *user, const char *path, void (*each)(void *arg, const char *name), void *arg) {
    disk_seat *s = (disk_seat *)user;
    disk *d = s->disk;
    int spoiled = disk_call(s, "list", path, -1, 0),
        node = spoiled ? -1 : disk_find(d, s->root, path), n = 0;
    if (node >= 0 && !d->node[node].folder) node = disk_fails(ENOTDIR);
    if (node < 0) return (int)disk_done(s, -1);
    char(*names)[DISK_NAME] = (char(*)[DISK_NAME])malloc((size_t)(d->n_entries + 1) * DISK_NAME);
    if (!names) abort();
    for (int i = d->n_entries - 1; i >= 0; i--)
        if (d->entry[i].folder == node) memcpy(names[n++], d->entry[i].name, DISK_NAME);
    disk_done(s, 0);
    for (int i = 0; i < n; i++) each(arg, names[i]);
    free(names);
    return 0;
}

static inline int disk_lock(void *user, int fd) {
    disk_seat *s = (disk_seat *)user;
    int i = disk_slot(s->disk, fd);
    if (disk_call(s, "lock", NULL, i, 0)) return (int)disk_done(s, -1);
    if (i < 0) return (int)disk_done(s, disk_fails(EBADF));
    disk_node *n = &s->disk->node[s->disk->fd[i].node];
    if (n->lock && n->lock != s->disk->fd[i].serial)
        return (int)disk_done(s, disk_fails(EWOULDBLOCK));
    n->lock = s->disk->fd[i].serial;
    return (int)disk_done(s, 0);
}

static inline dt_io disk_io(disk_seat *seat) {
    dt_io io = { seat, disk_open, disk_close, disk_size, disk_pread, disk_pwrite, disk_fsync,
        disk_rename, disk_resize, disk_remove, NULL, disk_mkdir, disk_list, disk_lock,
        disk_remove_folder };
    return io;
}

/* Adds a mark to the log: `what` is true from this point. */
static inline void disk_mark(disk *d, int what) {
    pthread_mutex_lock(&d->lock);
    disk_log(d, DISK_MARK, DISK_ROOT, 0)->at = (size_t)what;
    pthread_mutex_unlock(&d->lock);
}

/* 1 if the log holds the mark `what` within the first `end` changes. */
static inline int disk_marked(const disk *d, long end, int what) {
    for (long i = 0; i < end; i++)
        if (d->op[i].kind == DISK_MARK && d->op[i].at == (size_t)what) return 1;
    return 0;
}

/* ---- the power fails ---- */

/* Seeds say which changes that are not durable survive: none, all, all names and no bytes, all
   bytes and no names; seeds from DISK_SEEDS on choose at random. */
enum { DISK_NOTHING = 0, DISK_ALL, DISK_NAMES, DISK_DATA, DISK_SEEDS };
enum { DISK_LOST = 0, DISK_THERE, DISK_TORN };

static inline uint64_t disk_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline int disk_shares_name(const disk_op *a, const disk_op *b) {
    return strcmp(a->name, b->name) == 0 ||
           (a->kind == DISK_RENAME && strcmp(a->to, b->name) == 0) ||
           (b->kind == DISK_RENAME && strcmp(b->to, a->name) == 0) ||
           (a->kind == DISK_RENAME && b->kind == DISK_RENAME && strcmp(a->to, b->to) == 0);
}

/* Sets fate[i] for each of the first `end` changes: lost, kept or torn. */
static inline void disk_fates(const disk *d, long end, uint64_t seed, unsigned char *fate) {
    unsigned char *synced = (unsigned char *)calloc((size_t)(d->n_nodes + d->serials + 1), 1);
    uint64_t state = seed;
    if (!synced) abort();
    /* probabilities in quarters */
    unsigned names = (unsigned)(disk_random(&state) % 5),
             data = (unsigned)(disk_random(&state) % 5);
    for (long i = end - 1; i >= 0; i--) {
        const disk_op *op = &d->op[i];
        int is_data = op->kind == DISK_WRITE || op->kind == DISK_RESIZE;
        unsigned char *sure = &synced[is_data ? d->n_nodes + op->serial : op->node];
        if (op->kind == DISK_SYNC)
            synced[d->node[op->node].folder ? op->node : d->n_nodes + op->serial] = 1;
        if (op->kind == DISK_SYNC || op->kind == DISK_MARK) continue;
        uint64_t dice = disk_random(&state);
        if (fate[i]) continue; /* kept already, because a later change of the same name survives */
        fate[i] = dice % 4 < (is_data ? data : names) ? DISK_THERE : DISK_LOST;
        if (is_data && op->kind == DISK_WRITE && dice >> 8 & 1) fate[i] = DISK_TORN;
        if (seed < DISK_SEEDS)
            fate[i] = seed == DISK_ALL || seed == (is_data ? DISK_DATA : DISK_NAMES);
        if (*sure || i < d->settled) fate[i] = DISK_THERE;
        if (is_data || !fate[i]) continue;
        for (long k = 0; k < i; k++)
            if (d->op[k].kind <= DISK_REMOVE && d->op[k].node == op->node &&
                disk_shares_name(&d->op[k], op))
                fate[k] = DISK_THERE;
    }
    free(synced);
}

static inline void disk_redo_name(disk *out, const disk_op *op) {
    if (op->kind == DISK_RENAME || op->kind == DISK_REMOVE)
        disk_drop(out, op->node, op->name, op->child);
    if (op->kind != DISK_REMOVE)
        disk_enter(out, op->node, op->kind == DISK_RENAME ? op->to : op->name, op->child);
}

static inline void disk_redo_data(
    disk *out, const disk *d, const disk_op *op, int fate, uint64_t *state) {
    if (op->kind == DISK_RESIZE) {
        disk_size_to(&out->node[op->node], op->at);
        return;
    }
    for (size_t at = op->at, end = op->at + op->bytes; at < end;) {
        size_t stop = (at / DISK_SECTOR + 1) * DISK_SECTOR;
        if (stop > end) stop = end;
        disk_node *f = &out->node[op->node];
        if (fate == DISK_THERE || disk_random(state) & 1) {
            if (stop > f->size) disk_size_to(f, stop);
            memcpy(f->data + at, d->bytes + op->data + (at - op->at), stop - at);
        }
        at = stop;
    }
}

/* Makes `out`: the content of d after a power failure after the first `end` changes. */
static inline void disk_cut(disk *out, const disk *d, long end, uint64_t seed) {
    unsigned char *fate = (unsigned char *)calloc((size_t)end + 1, 1);
    uint64_t state = ~seed;
    if (!fate) abort();
    disk_make(out);
    for (int i = 1; i < d->n_nodes; i++) disk_node_new(out, d->node[i].folder);
    disk_fates(d, end, seed, fate);
    /* bit mask of descriptors whose writes that are not durable are applied last */
    uint64_t late = seed < DISK_SEEDS ? 0 : disk_random(&state);
    for (int last = 0; last < 2; last++)
        for (long i = 0; i < end; i++) {
            const disk_op *op = &d->op[i];
            int is_late = op->kind == DISK_WRITE && i >= d->settled && late >> op->serial % 64 & 1;
            for (long k = i + 1; k < end && is_late; k++)
                if (d->op[k].kind == DISK_SYNC && d->op[k].serial == op->serial) is_late = 0;
            if (!fate[i] || is_late != last) continue;
            if (op->kind <= DISK_REMOVE)
                disk_redo_name(out, op);
            else if (op->kind <= DISK_RESIZE)
                disk_redo_data(out, d, op, fate[i], &state);
        }
    out->n_ops = 0; /* later cuts of `out` cannot lose what it holds now */
    for (int i = 1; i < out->n_nodes; i++) {
        disk_log(out, DISK_RESIZE, i, 0)->at = out->node[i].size;
        if (out->node[i].size) disk_log_write(out, i, 0, out->node[i].data, out->node[i].size, 0);
    }
    for (int i = 0; i < out->n_entries; i++) {
        disk_op *op = disk_log(out, DISK_ENTER, out->entry[i].folder, 0);
        op->child = out->entry[i].node;
        snprintf(op->name, DISK_NAME, "%s", out->entry[i].name);
    }
    out->settled = out->n_ops;
    free(fate);
}

/* A copy of the disk with no open descriptor. */
static inline void disk_copy(disk *out, const disk *d) { disk_cut(out, d, d->n_ops, DISK_ALL); }

#endif
