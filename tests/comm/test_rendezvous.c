/* test_rendezvous.c - how ranks over sockets find each other: proofs, tokens, unauthenticated
   clients, impostors, names

   Jobs come from tcp_jobs.h. This program itself acts as a visitor (tcp_visitor.h). */
#ifndef _GNU_SOURCE /* g++ sets it */
#define _GNU_SOURCE
#endif
#define DT_IMPLEMENTATION
#include "dt_comm.h"

#include "tests/support/check.h"
#include "tests/comm/tcp_jobs.h"
#include "tests/comm/tcp_visitor.h"

static const char token[] = "0123456789abcdef", other_token[] = "0123456789abcdeg";

/* ---- 1. SHA-256 and HMAC ---- */

static int is_hex(const uint8_t digest[32], const char *hex) {
    char text[65];
    for (int i = 0; i < 32; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
    return strcmp(text, hex) == 0;
}

static void test_sha256(void) {
    static const struct {
        const char *text, *digest;
    } known[] = {
        { "", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" },
        { "abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" },
        { "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1" },
    };
    uint8_t digest[32];
    dt__sha256 s;
    for (int i = 0; i < 3; i++) {
        dt__sha256_of(known[i].text, strlen(known[i].text), digest);
        CHECK_MSG(is_hex(digest, known[i].digest), "SHA-256 of '%s'", known[i].text);
    }
    dt__sha256_begin(&s);
    for (int i = 0; i < 100000; i++) dt__sha256_add(&s, "aaaaaaaaaa", 10);
    dt__sha256_end(&s, digest);
    CHECK(is_hex(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
    /* all digests of 0 .. 130 letters x, concatenated: covers every position of the padding */
    uint8_t all[131 * 32], x[130];
    memset(x, 'x', sizeof x);
    for (size_t n = 0; n <= 130; n++) dt__sha256_of(x, n, all + 32 * n);
    dt__sha256_of(all, sizeof all, digest);
    CHECK(is_hex(digest, "f5a018ad6f7a21c451c8d98b57699f4aeeb1976b88771c339c7ea60cd09c64ef"));
}

/* the cases of RFC 4231 except the fifth, whose output is truncated */
static void test_hmac(void) {
    static const struct {
        char key;
        int key_bytes;
        const char *text;
        char fill;
        int fills;
        const char *digest;
    } c[] = {
        { 0x0b, 20, "Hi There", 0, 0,
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7" },
        { 0, 4, "what do ya want for nothing?", 0, 0,
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843" },
        { (char)0xaa, 20, "", (char)0xdd, 50,
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe" },
        { 1, 25, "", (char)0xcd, 50,
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b" },
        { (char)0xaa, 131, "Test Using Larger Than Block-Size Key - Hash Key First", 0, 0,
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54" },
        { (char)0xaa, 131,
            "This is a test using a larger than block-size key and a larger than block-size data. "
            "The "
            "key needs to be hashed before being used by the HMAC algorithm.",
            0, 0, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2" },
    };
    for (int i = 0; i < 6; i++) {
        char key[131], data[200];
        uint8_t digest[32];
        size_t bytes = strlen(c[i].text);
        memset(key, c[i].key, sizeof key);
        for (int k = 0; i == 3 && k < 25; k++) key[k] = (char)(k + 1);
        if (i == 1) memcpy(key, "Jefe", 4);
        memcpy(data, c[i].text, bytes);
        memset(data + bytes, c[i].fill, (size_t)c[i].fills);
        size_t key_bytes = (size_t)c[i].key_bytes;
        if (key_bytes > 64) { /* longer than a block of the hash: its hash is the key */
            dt__sha256_of(key, key_bytes, digest);
            memcpy(key, digest, key_bytes = sizeof digest);
        }
        dt__hmac(key, key_bytes, data, bytes + (size_t)c[i].fills, digest);
        CHECK_MSG(is_hex(digest, c[i].digest), "RFC 4231, case %d of this table", i);
        dt__hmac(key, key_bytes, data, bytes + (size_t)c[i].fills, (uint8_t *)key);
        CHECK_MSG(is_hex((uint8_t *)key, c[i].digest),
            "RFC 4231, case %d of this table, with the digest written over the key", i);
    }
    uint8_t a[32] = { 1, 2, 3 }, b[32] = { 1, 2, 3 };
    CHECK(dt__equal_secrets(a, b, 32));
    for (int i = 0; i < 32; i++) {
        b[i] ^= 0x80;
        CHECK(!dt__equal_secrets(a, b, 32));
        b[i] ^= 0x80;
    }
}

/* ---- 2. descriptions and tokens ---- */

static dt_status single_rank(dt_ctx *ctx, void *user) {
    float x = 3, y = 0;
    (void)user;
    CHECK(dt_all_reduce(dt_world(ctx), &x, &y, 1, DT_F32, DT_SUM) == DT_OK && y == 3);
    CHECK(dt_send(dt_world(ctx), &x, 1, DT_F32, 0, 0) == DT_OK);
    y = 0;
    CHECK(dt_recv(dt_world(ctx), &y, 1, DT_F32, 0, 0) == DT_OK && y == 3);
    return dt_barrier(dt_world(ctx));
}

static void test_descriptions(void) {
    static const char *const places[] = { "nowhere.invalid", "127.0.0.1:", "127.0.0.1:0",
        "127.0.0.1:65536", "127.0.0.1:x", "1.2.3:4", "127.0.0.1:29500 ", "::1:4", "1.2.3.4.5",
        "no where" };
    spy s;
    dt_report report;
    dt_run_desc desc;
    spy_make(&s);
    memset(&desc, 0, sizeof desc);
    desc.backend = DT_BACKEND_TCP;
    desc.host = &s.host;
    desc.report = &report;
    CHECK(dt_run(desc, single_rank, NULL) == DT_OK); /* one rank needs no sockets */
    CHECK(s.live == 0 && s.error_lines == 0);
    for (int i = 0; i < 10; i++) {
        desc.rendezvous = places[i];
        CHECK_MSG(dt_run(desc, single_rank, NULL) == DT_ERR_ARG && strstr(report.text, places[i]),
            "%s: %s", places[i], report.text);
    }
    desc.rendezvous = "localhost:1";
    CHECK(dt_run(desc, single_rank, NULL) == DT_OK);
    desc.rank = 1;
    CHECK(dt_run(desc, single_rank, NULL) == DT_ERR_ARG && strstr(report.text, "rank 1 of 1") &&
          report.rank == -1);
    desc.rank = -1;
    CHECK(dt_run(desc, single_rank, NULL) == DT_ERR_ARG);
    dt_kernels device = *dt_kernels_cpu();
    device.alloc = (void *(*)(void *, size_t))(void *)spy_alloc;
    desc.rank = 0;
    desc.kernels = &device;
    CHECK(dt_run(desc, single_rank, NULL) == DT_ERR_UNSUPPORTED);
    desc.kernels = NULL;
    int fd = dt__tcp_listen(loopback(0), 1); /* a port in use */
    char place[64];
    snprintf(place, sizeof place, "127.0.0.1:%d", (int)dt__tcp_own_address(fd).port);
    desc.ranks = 2;
    desc.rendezvous = place;
    CHECK_MSG(dt_run(desc, short_rank, NULL) == DT_ERR_COMM &&
                  strstr(report.text, "another program does") && strstr(report.text, place),
        "%s", report.text);
    close(fd);
    desc.rendezvous = "203.0.113.7:5"; /* only rank 0's machine must have the address */
    desc.token = token;
    CHECK_MSG(
        dt_run(desc, short_rank, NULL) == DT_ERR_COMM && strstr(report.text, "not this machine's"),
        "%s", report.text);
    CHECK(s.live == 0);
}

static dt__tcp_address place_of(const char *text) {
    dt__tcp_address place = { 0, 0 };
    CHECK_MSG(dt__tcp_address_parse(text, &place), "%s", text);
    return place;
}

static void test_addresses(void) {
    char host[200] = "", text[256];
    dt__tcp_address place = place_of("10.1.2.3:77");
    CHECK(place.ip == htonl(0x0a010203) && place.port == 77 && !dt__tcp_is_loopback(place));
    CHECK(place_of("127.3.4.5").port == 29500 && dt__tcp_is_loopback(place_of("127.3.4.5")));
    CHECK(place_of(NULL).ip == htonl(INADDR_LOOPBACK) && place_of("").port == 29500);
    CHECK(place_of("0.0.0.0:9").ip == 0 && !dt__tcp_is_loopback(place_of("0.0.0.0:9")));
    CHECK(place_of("localhost").ip == htonl(INADDR_LOOPBACK));
    struct addrinfo *found = NULL;
    gethostname(host, sizeof host - 1);
    if (getaddrinfo(host, NULL, NULL, &found) != 0) {
        check_skip("the name of this machine is not known to its resolver");
        return;
    }
    freeaddrinfo(found);
    snprintf(text, sizeof text, "%s:12", host);
    place = place_of(text);
    CHECK(place.port == 12 && place.ip != 0);
    if (dt__tcp_interface_address())
        CHECK_MSG(!dt__tcp_is_loopback(place), "%s: an address of the loopback", host);
}

/* Checks the error of dt_run with two ranks at a rendezvous that other machines can reach. */
static int refuses(const char *given, const char *file, const char *environment, const char *says) {
    dt_report report;
    dt_run_desc desc;
    spy s;
    spy_make(&s);
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    desc.backend = DT_BACKEND_TCP;
    desc.rendezvous = "203.0.113.7:5";
    desc.host = &s.host;
    desc.report = &report;
    desc.token = given;
    unsetenv("DT_TOKEN_FILE");
    unsetenv("DT_TOKEN");
    if (file) setenv("DT_TOKEN_FILE", file, 1);
    if (environment) setenv("DT_TOKEN", environment, 1);
    dt_status status = dt_run(desc, short_rank, NULL);
    unsetenv("DT_TOKEN_FILE");
    unsetenv("DT_TOKEN");
    return CHECK_MSG(
        status && strstr(report.text, says), "expected '%s', got: %s", says, report.text);
}

static void write_file(const char *path, const char *text, mode_t mode) {
    unlink(path);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK(
        fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && fchmod(fd, mode) == 0);
    close(fd);
}

static void test_tokens(void) {
    /* the token is accepted, so the next error is the socket's */
    static const char fine[] = "not this machine's";
    char path[] = "/tmp/dt_token_XXXXXX", large[5000];
    uint8_t key[32], want[32];
    char why[512];
    dt_run_desc desc;
    int fd = mkstemp(path);
    close(fd);
    refuses(NULL, NULL, NULL, "head -c 32 /dev/urandom | base64 > token; chmod 600 token");
    refuses(NULL, NULL, NULL, "203.0.113.7:5 can be reached from other machines");
    refuses(NULL, NULL, "", "there is no token");
    refuses(
        NULL, NULL, "123456789012345", "the token of DT_TOKEN has 15 bytes; it needs at least 16");
    refuses(NULL, NULL, token, fine);
    refuses("", NULL, token, "the token of dt_run_desc.token has 0 bytes");
    refuses(token, path, "short", fine);
    refuses(NULL, "/nowhere/token", token, "DT_TOKEN_FILE=/nowhere/token cannot be opened");
    refuses(NULL, "/dev", token, "DT_TOKEN_FILE=/dev");
    write_file(path, "0123456789abcdef\r\n", 0600);
    refuses(NULL, path, "short", fine);
    write_file(path, "0123456789abcde\n", 0600);
    refuses(NULL, path, token, "the token of DT_TOKEN_FILE has 15 bytes");
    write_file(path, token, 0640);
    refuses(NULL, path, token, "(mode 640): chmod 600");
    write_file(path, token, 0604);
    refuses(NULL, path, token, "others than its owner may use the token's file");
    memset(large, 'x', sizeof large);
    large[sizeof large - 1] = 0;
    write_file(path, large, 0400);
    refuses(NULL, path, token, "is not a token file");
    /* a file, the environment and the field give the same key; without a token the key is that of
       the empty string */
    memset(&desc, 0, sizeof desc);
    desc.ranks = 2;
    dt__sha256_of(token, 16, want);
    write_file(path, "0123456789abcdef\n\n", 0600);
    setenv("DT_TOKEN_FILE", path, 1);
    CHECK(dt__tcp_key(&desc, loopback(1), key, why) && memcmp(key, want, 32) == 0);
    unsetenv("DT_TOKEN_FILE");
    setenv("DT_TOKEN", token, 1);
    CHECK(dt__tcp_key(&desc, loopback(1), key, why) && memcmp(key, want, 32) == 0);
    unsetenv("DT_TOKEN");
    desc.token = token;
    CHECK(dt__tcp_key(&desc, loopback(1), key, why) && memcmp(key, want, 32) == 0);
    desc.token = NULL;
    CHECK(dt__tcp_key(&desc, loopback(1), key, why) && memcmp(key, want, 32) != 0);
    unlink(path);
}

/* ---- 3. a visitor ---- */

static void expect_refusal(visit v, int as_is, const char *says) {
    int there = shake_hands(&v, as_is);
    const char *text = dt__tcp_reason(&v.ours, &v.answer).s;
    CHECK_MSG(there && v.answer.kind == DT__TCP_REFUSED && strcmp(text, says) == 0,
        "not '%s': kind %u, '%s'", says, v.answer.kind, there ? text : "no answer");
    char c;
    CHECK(recv(v.fd, &c, 1, 0) <= 0); /* the job closes the connection */
    close(v.fd);
}

/* Every reason to refuse a visitor, at the rendezvous of a job that has a token and waits for ranks
   2 and 3. */
static void test_refusals(void) {
    job *j = job_make(4, short_rank, 0);
    char says[160];
    for (int rank = 0; rank < 4; rank++) j->token[rank] = token;
    j->late[2] = j->late[3] = 1.5;
    job_start(j);
    expect_refusal(
        visit_make(loopback(j->port), 2, 4, other_token), 0, "the token is not this job's");
    expect_refusal(visit_make(loopback(j->port), 2, 4, ""), 0, "the token is not this job's");
    visit v = visit_make(loopback(j->port), 2, 4, token);
    expect_refusal(v, 1, "the token is not this job's"); /* a proof of zeros */
    /* without the token, the text says nothing about rank and size */
    expect_refusal(
        visit_make(loopback(j->port), 7, 3, other_token), 0, "the token is not this job's");
    expect_refusal(
        visit_make(loopback(j->port), 2, 3, token), 0, "its job has 3 ranks, this one has 4");
    expect_refusal(visit_make(loopback(j->port), 4, 4, token), 0, "rank 4 is not expected here");
    expect_refusal(visit_make(loopback(j->port), 0, 4, token), 0, "rank 0 is not expected here");
    expect_refusal(visit_make(loopback(j->port), -1, 4, token), 0, "rank -1 is not expected here");
    v.ours.job = 5;
    expect_refusal(v, 0, "it belongs to another job");
    nap(0.1); /* rank 1 is connected by now */
    snprintf(says, sizeof says, "rank 1 is already connected: process %d on ", (int)j->pid[1]);
    char host[DT__TCP_NAME_BYTES] = "";
    gethostname(host, sizeof host - 1);
    strncat(says, host, sizeof says - strlen(says) - 1);
    expect_refusal(visit_make(loopback(j->port), 1, 4, token), 0, says);
    v = visit_make(loopback(j->port), 2, 4, token);
    v.ours.version = 7;
    v.fd = connect_to(v.place);
    send(v.fd, &v.ours, 12, MSG_NOSIGNAL); /* magic and version suffice for the refusal */
    CHECK(receive_message(v.fd, &v.answer) && v.answer.kind == DT__TCP_REFUSED &&
          v.answer.version == DT__TCP_VERSION &&
          strcmp(dt__tcp_reason(&v.ours, &v.answer).s, "version 7 of the protocol, not 3") == 0);
    close(v.fd);
    /* a proof first, or a second hello: the connection is closed without an answer */
    v = visit_make(loopback(j->port), 2, 4, token);
    for (int twice = 0; twice < 2; twice++) {
        v.fd = connect_to(v.place);
        dt__tcp_handshake *first = twice ? &v.ours : &v.proof;
        send(v.fd, first, sizeof *first, MSG_NOSIGNAL);
        if (twice) CHECK(receive_message(v.fd, &v.theirs));
        if (twice) send(v.fd, first, sizeof *first, MSG_NOSIGNAL);
        CHECK(!receive_message(v.fd, &v.answer));
        close(v.fd);
    }
    job_wait(j);
    check_well(j);
    CHECK_MSG(j->result[0].host.notices == 1, "%d notices", j->result[0].host.notices);
    job_free(j);
}

/* An eavesdropper replays a successful handshake: unchanged, with the same hello, and with each
   proved field changed. */
static void test_replay(void) {
    job *j = job_make(3, short_rank, 0);
    for (int rank = 0; rank < 3; rank++) j->token[rank] = token;
    j->late[1] = j->late[2] = 1;
    job_start(j);
    visit v = visit_make(loopback(j->port), 2, 3, token), again, theirs;
    CHECK(shake_hands(&v, 0) && is_accepted(&v) && v.theirs.rank == 0 && v.theirs.size == 3 &&
          v.theirs.job && v.theirs.pid == (int)j->pid[0]);
    again = theirs = v;
    close(v.fd); /* frees the slot of this rank */
    nap(0.05);
    expect_refusal(again, 1, "the token is not this job's");
    CHECK(shake_hands(&theirs, 0) && is_accepted(&theirs) &&
          memcmp(theirs.theirs.nonce, v.theirs.nonce, 32) != 0);
    CHECK(memcmp(theirs.answer.proof, v.answer.proof, 32) != 0);
    close(theirs.fd);
    static const size_t said[] = { offsetof(dt__tcp_handshake, rank),
        offsetof(dt__tcp_handshake, size), offsetof(dt__tcp_handshake, pid),
        offsetof(dt__tcp_handshake, address), offsetof(dt__tcp_handshake, job),
        offsetof(dt__tcp_handshake, nonce), offsetof(dt__tcp_handshake, host) };
    for (size_t i = 0; i < 7; i++) { /* a man in the middle changes a field */
        v = visit_make(loopback(j->port), 2, 3, token);
        v.fd = connect_to(v.place);
        dt__tcp_handshake changed = v.ours;
        ((char *)&changed)[said[i]] ^= 1;
        send(v.fd, &changed, sizeof changed, MSG_NOSIGNAL);
        CHECK(receive_message(v.fd, &v.theirs));
        dt__tcp_prove(v.key, "caller", &v.ours, &v.theirs, v.proof.proof);
        send(v.fd, &v.proof, sizeof v.proof, MSG_NOSIGNAL);
        CHECK_MSG(receive_message(v.fd, &v.answer) && v.answer.reason == DT__TCP_WRONG_TOKEN,
            "field %zu is not covered by the proof", i);
        close(v.fd);
    }
    job_wait(j);
    check_well(j);
    job_free(j);
}

/* ---- 4. impostors ---- */

/* The fake host that a rank connects to. */
enum {
    NO_PROOF = 0,
    HIS_OWN_PROOF,
    REPLAYED,
    OTHER_TOKEN,
    OTHER_RANK,
    REFUSES,
    OTHER_VERSION,
    NO_CARD,
    HANGS_UP,
    N_FAKES
};
static const char *const fake_says[] = {
    "does not prove that it is rank 0 of this job",
    "does not prove that it is rank 0 of this job",
    "does not prove that it is rank 0 of this job",
    "does not prove that it is rank 0 of this job",
    "is not rank 0 of a job",
    "refuses this rank: the token is not this job's",
    "refuses this rank: version 3 of the protocol, not 9",
    "is not rank 0 of a job",
    "timeout 1.0 s: rank 0 did not come to 127.0.0.1:",
};

static int accept_one(int door) {
    struct pollfd look = { door, POLLIN, 0 };
    return poll(&look, 1, 5000) > 0 ? accept(door, NULL, NULL) : -1;
}

/* Answers a connecting rank as `how` says. */
static void act_as_host(int door, int how, const visit *overheard) {
    dt__tcp_handshake hello, proof;
    visit v = visit_make(
        loopback(0), how == OTHER_RANK ? 1 : 0, 2, how == OTHER_TOKEN ? other_token : token);
    int fd = accept_one(door);
    if (!CHECK(fd >= 0 && receive_message(fd, &hello))) return;
    v.ours.job = 99;
    if (how == REPLAYED) v.ours = overheard->theirs;
    if (how == OTHER_VERSION) v.ours.version = 9;
    if (how == NO_CARD) memset(&v.ours, 'x', sizeof v.ours);
    if (how == REFUSES) v.ours.kind = DT__TCP_REFUSED, v.ours.reason = DT__TCP_WRONG_TOKEN;
    if (how != HANGS_UP) send(fd, &v.ours, sizeof v.ours, MSG_NOSIGNAL);
    if (how <= OTHER_TOKEN && CHECK(receive_message(fd, &proof))) {
        dt__tcp_handshake welcome = v.ours;
        welcome.kind = DT__TCP_WELCOME;
        if (how == HIS_OWN_PROOF) memcpy(welcome.proof, proof.proof, sizeof welcome.proof);
        if (how == REPLAYED) memcpy(welcome.proof, overheard->answer.proof, sizeof welcome.proof);
        if (how == OTHER_TOKEN) dt__tcp_prove(v.key, "host", &hello, &v.ours, welcome.proof);
        send(fd, &welcome, sizeof welcome, MSG_NOSIGNAL);
    }
    char c;
    if (how != HANGS_UP) CHECK(recv(fd, &c, 1, 0) <= 0);
    close(fd);
    for (double until = seconds() + 0.8; how == HANGS_UP && seconds() < until;)
        close(accept_one(door));
}

static void test_fake_hosts(void) {
    job *real = job_make(3, short_rank, 0);
    for (int rank = 0; rank < 3; rank++) real->token[rank] = token;
    real->late[1] = real->late[2] = 0.5;
    job_start(real);
    visit overheard = visit_make(loopback(real->port), 1, 3, token);
    CHECK(shake_hands(&overheard, 0) && is_accepted(&overheard));
    close(overheard.fd);
    for (int how = 0; how < N_FAKES; how++) {
        job *j = job_make(2, short_rank, 0);
        j->absent = 1;
        j->token[1] = token;
        j->timeout_s = 1;
        int door = dt__tcp_listen(loopback(j->port), 10);
        fcntl(door, F_SETFL, 0);
        job_start(j);
        act_as_host(door, how, &overheard);
        job_wait(j);
        const rank_result *r = &j->result[1];
        CHECK_MSG(r->status && strstr(r->report.text, fake_says[how]) && in_time(r->took, 4),
            "fake %d: %.1f s: %s", how, r->took, r->report.text);
        close(door);
        job_free(j);
    }
    job_wait(real);
    check_well(real);
    job_free(real);
}

/* The visitor joins rank 0 as a valid rank of the job, and then acts as an impostor towards another
   rank. */
static void test_mesh(void) {
    dt__tcp_table table;
    dt__tcp_address places[3];
    job *j = job_make(3, short_rank, 0);
    for (int rank = 0; rank < 3; rank++) j->token[rank] = token;
    j->absent = 1 << 2; /* the visitor is rank 2 and connects to rank 1 */
    job_start(j);
    visit v = visit_make(loopback(j->port), 2, 3, token);
    CHECK(shake_hands(&v, 0) && is_accepted(&v));
    CHECK(recv(v.fd, &table, sizeof table, MSG_WAITALL) == (ssize_t)sizeof table && !table.failed);
    CHECK(recv(v.fd, places, sizeof places, MSG_WAITALL) == (ssize_t)sizeof places);
    int port = (int)places[1].port;
    visit w = visit_make(loopback(port), 2, 3, other_token);
    w.ours.job = v.theirs.job;
    expect_refusal(w, 0, "the token is not this job's");
    expect_refusal(visit_make(loopback(port), 2, 3, token), 0, "it belongs to another job");
    w = visit_make(loopback(port), 2, 3, token);
    w.ours.job = v.theirs.job ^ 2;
    expect_refusal(w, 0, "it belongs to another job");
    w.ours.job = v.theirs.job;
    w.ours.rank = 1;
    expect_refusal(w, 0, "rank 1 is not expected here");
    w.ours.rank = 2;
    CHECK(shake_hands(&w, 0) && is_accepted(&w) && w.theirs.rank == 1);
    close(w.fd);
    close(v.fd);
    job_wait(j);
    for (int rank = 0; rank < 2; rank++)
        CHECK_MSG(strstr(j->result[rank].report.text, "rank 2 (process 4711 on visitor) was lost"),
            "rank %d: %s", rank, j->result[rank].report.text);
    job_free(j);
    j = job_make(3, short_rank, 0); /* now the visitor is rank 1, and rank 2 connects to it */
    for (int rank = 0; rank < 3; rank++) j->token[rank] = token;
    j->absent = 1 << 1;
    job_start(j);
    v = visit_make(loopback(j->port), 1, 3, token);
    int door = dt__tcp_listen(loopback(0), 10), fd;
    fcntl(door, F_SETFL, 0);
    v.ours.address = dt__tcp_own_address(door);
    dt__tcp_handshake hello, card = v.ours;
    CHECK(shake_hands(&v, 0) && is_accepted(&v));
    fd = accept_one(door);
    CHECK(fd >= 0 && receive_message(fd, &hello) && hello.rank == 2 && hello.job == v.theirs.job);
    card.job = v.theirs.job;
    send(fd, &card, sizeof card, MSG_NOSIGNAL);
    CHECK(receive_message(fd, &card));
    card = v.ours;
    card.kind = DT__TCP_WELCOME;
    send(fd, &card, sizeof card, MSG_NOSIGNAL);
    job_wait(j);
    CHECK_MSG(strstr(j->result[2].report.text, "does not prove that it is rank 1 of this job"),
        "%s", j->result[2].report.text);
    close(fd);
    close(v.fd);
    close(door);
    job_free(j);
}

/* ---- 5. jobs ---- */

/* Process 3 claims to be rank 2 of 3 with a wrong token or size, before the real rank 2 (if `late`:
   after it). The job continues without process 3. */
static void wrong_rank(const char *secret, int size, int late, const char *says) {
    job *j = job_make(4, short_rank, 0);
    for (int rank = 0; rank < 4; rank++) {
        j->token[rank] = token;
        j->size[rank] = 3;
    }
    j->as[3] = 3;
    j->token[3] = secret;
    j->size[3] = size;
    j->after_notice = 1 << 1; /* the job is not complete before rank 3 is rejected */
    j->late[2] = late ? 0 : 0.5;
    j->late[3] = late ? 0.3 : 0;
    job_start(j);
    job_wait(j);
    for (int rank = 0; rank < 3; rank++)
        CHECK_MSG(j->result[rank].status == DT_OK, "'%s': rank %d: %s", says, rank,
            j->result[rank].report.text);
    CHECK_MSG(j->result[3].status == DT_ERR_COMM && strstr(j->result[3].report.text, says) &&
                  in_time(j->result[3].took, 1) &&
                  strstr(j->result[3].report.text, "rank 0 at 127.0.0.1:"),
        "expected '%s', got: %s", says, j->result[3].report.text);
    CHECK(j->result[0].host.notices == 1 && j->result[3].host.error_lines == 1);
    job_free(j);
}

static void test_jobs(void) {
    for (int ranks = 2; ranks <= 5; ranks++) {
        job *j = job_make(ranks, short_rank, 0);
        for (int rank = 0; rank < ranks; rank++) j->token[rank] = token;
        job_start(j);
        job_wait(j);
        check_well(j);
        CHECK(j->result[0].host.notices == 0);
        job_free(j);
    }
    wrong_rank(other_token, 3, 0, "the token is not this job's");
    wrong_rank(NULL, 3, 0, "the token is not this job's");
    wrong_rank(token, 4, 0, "its job has 4 ranks, this one has 3");
    wrong_rank(token, 3, 1, "rank 2 is already connected: process ");
}

static void test_absent(void) {
    job *j = job_make(4, short_rank, 0);
    j->absent = 1 << 2;
    j->timeout_s = 1;
    job_start(j);
    close(connect_to(loopback(j->port)));
    job_wait(j);
    for (int rank = 0; rank < 4; rank += rank == 1 ? 2 : 1) {
        const rank_result *r = &j->result[rank];
        CHECK_MSG(
            r->status &&
                strstr(r->report.text, "of 4 ranks rank 2 did not come; 1 connection was rejected, "
                                       "the last 127.0.0.1:") &&
                strstr(r->report.text, "it hung up") && in_time(r->took, 5),
            "rank %d: %s, %.1f s", rank, r->report.text, r->took);
        CHECK(r->status == (rank ? DT_ERR_PEER : DT_ERR_TIMEOUT));
    }
    job_free(j);
    j = job_make(3, short_rank, 0);
    j->absent = 1;
    j->timeout_s = 0.7;
    job_start(j);
    job_wait(j);
    for (int rank = 1; rank < 3; rank++)
        CHECK_MSG(j->result[rank].status == DT_ERR_TIMEOUT && in_time(j->result[rank].took, 5) &&
                      strstr(j->result[rank].report.text, "rank 0 did not come to 127.0.0.1:"),
            "%s", j->result[rank].report.text);
    job_free(j);
    j = job_make(3, short_rank, 0); /* rank 0 starts last */
    j->late[0] = 0.5;
    job_start(j);
    job_wait(j);
    check_well(j);
    job_free(j);
}

/* ---- 6. unauthenticated clients ---- */

/* All kinds of unauthenticated clients connect to rank 0 while it waits for ranks 2 and 3. */
static void test_unauthenticated(void) {
    enum { IDLE = 350 };
    static int idle[IDLE];
    int fd;
    char garbage[300];
    job *j = job_make(4, short_rank, 0);
    for (int rank = 0; rank < 4; rank++) j->token[rank] = token;
    j->late[2] = j->late[3] = 1.5;
    memset(garbage, 'x', sizeof garbage);
    job_start(j);
    /* silent connections that stay open */
    for (int i = 0; i < IDLE; i++) idle[i] = i < 40 ? connect_to(loopback(j->port)) : -1;
    fd = connect_to(loopback(j->port));
    CHECK(fd >= 0 && send(fd, garbage, sizeof garbage, MSG_NOSIGNAL) == (ssize_t)sizeof garbage);
    char c;
    CHECK(recv(fd, &c, 1, 0) <= 0); /* the job closes the connection */
    close(fd);
    visit v = visit_make(loopback(j->port), 2, 4, token);
    int half = connect_to(loopback(j->port));
    CHECK(send(half, &v.ours, 20, MSG_NOSIGNAL) == 20); /* half a hello, then nothing */
    close(connect_to(loopback(j->port)));               /* connects and disconnects */
    /* takes the slot of rank 2 and leaves before the real rank 2 connects */
    CHECK(shake_hands(&v, 0) && is_accepted(&v));
    nap(0.1);
    close(v.fd);
    for (int i = 40; i < IDLE; i++) /* more than there are slots */
        idle[i] = i > 40 && idle[i - 1] < 0 ? -1 : connect_to(loopback(j->port));
    job_wait(j);
    check_well(j);
    CHECK_MSG(in_time(j->result[0].took, 8), "%.1f s", j->result[0].took);
    for (int i = 0; i < IDLE; i++) close(idle[i]);
    close(half);
    job_free(j);
}

/* Rank 0 waits under attack; forming the job takes at most a second longer. */
static void test_attacks(void) {
    for (int what = 0; what < N_ATTACKS; what++) {
        job *j = job_make(4, short_rank, 0);
        for (int rank = 0; rank < 4; rank++) j->token[rank] = token;
        for (int rank = 1; rank < 4; rank++) j->late[rank] = 0.7;
        j->after_notice = 1 << 1 | 1 << 2 | 1 << 3;
        job_start(j);
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            alarm(1800);
            dt__tcp_address from = { htonl(0x7f000002), 0 };
            attack(loopback(j->port), what, from);
            _exit(0);
        }
        job_wait(j);
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        check_well(j);
        double took = fmax(fmax(j->result[1].took, j->result[2].took), j->result[3].took);
        CHECK_MSG(in_time(took, 1) && j->result[0].host.notices == 1,
            "%s: the job formed after %.2f s, %d notices", attack_names[what], took,
            j->result[0].host.notices);
        CHECK_MSG(j->result[0].host.largest < 300000, "%s: %zu bytes were allocated",
            attack_names[what], j->result[0].host.largest);
        long more = j->result[0].peak_kib - j->result[1].peak_kib;
        CHECK_MSG(
            more < 16384, "%s: rank 0 has %ld KiB more than the others", attack_names[what], more);
        printf("%s: the job formed in %.0f ms; rank 0 took %+ld KiB\n", attack_names[what],
            1e3 * took, more);
        job_free(j);
    }
}

/* ---- 7. names of processes and hosts ---- */

static dt_status killed_rank(dt_ctx *ctx, void *user) {
    (void)user;
    dt_barrier(dt_world(ctx));
    if (dt_ctx_rank(ctx) == 1) kill(getpid(), SIGKILL);
    return dt_barrier(dt_world(ctx));
}

static void test_names(void) {
    job *j = run_job(3, killed_rank, 0);
    char says[160], host[DT__TCP_NAME_BYTES] = "", name[DT__TCP_NAME_BYTES];
    gethostname(host, sizeof host - 1);
    snprintf(says, sizeof says, "connection to rank 1 (process %d on %s) was lost", (int)j->pid[1],
        host);
    for (int rank = 0; rank < 3; rank += 2)
        CHECK_MSG(strstr(j->result[rank].report.text, says), "expected '%s', got: %s", says,
            j->result[rank].report.text);
    job_free(j);
    char odd[DT__TCP_NAME_BYTES] = "node-1.a_b\033[2J\n%s", none[DT__TCP_NAME_BYTES] = "",
         whole[DT__TCP_NAME_BYTES];
    dt__tcp_host_name(name, odd);
    CHECK_MSG(strcmp(name, "node-1.a_b\\x1b[2J\\x0a%s") == 0, "%s", name);
    dt__tcp_host_name(name, none);
    CHECK(strcmp(name, "?") == 0);
    memset(whole, 'x', sizeof whole); /* without a terminating zero */
    dt__tcp_host_name(name, whole);
    CHECK(strlen(name) == sizeof name - 1);
}

/* Both ends of each connection send keepalive probes while idle. */
static dt_status probe_rank(dt_ctx *ctx, void *user) {
    dt__tcp *t = (dt__tcp *)dt_world(ctx)->world->transport.user;
    (void)user;
    for (int rank = 0; rank < t->size; rank++) {
        int on = 0, idle = 0, apart = 0, probes = 0;
        socklen_t length = sizeof on;
        if (rank == t->rank) continue;
        CHECK(getsockopt(t->peers[rank].fd, SOL_SOCKET, SO_KEEPALIVE, &on, &length) == 0 && on);
        CHECK(getsockopt(t->peers[rank].fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, &length) == 0);
        CHECK(getsockopt(t->peers[rank].fd, IPPROTO_TCP, TCP_KEEPINTVL, &apart, &length) == 0);
        CHECK(getsockopt(t->peers[rank].fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, &length) == 0);
        CHECK_MSG(idle + apart * probes == 21 && probes == 8,
            "keepalive after %d s, then %d probes every %d s", idle, probes, apart);
        int fresh = socket(AF_INET, SOCK_STREAM, 0), pause_ms = 2500,
            rto_max = 44 /* TCP_RTO_MAX_MS */;
        /* Linux 6.15 */
        if (setsockopt(fresh, IPPROTO_TCP, rto_max, &pause_ms, sizeof pause_ms) == 0) {
            pause_ms = 0;
            CHECK(getsockopt(t->peers[rank].fd, IPPROTO_TCP, rto_max, &pause_ms, &length) == 0);
            CHECK_MSG(
                pause_ms == 2500, "%d ms between two attempts, of a timeout of 20 s", pause_ms);
        }
        close(fresh);
    }
    return dt_barrier(dt_world(ctx));
}

/* ---- the token and the keys derived from it are wiped from memory ---- */

/* The secrets to search for, XORed with a mask so that the search does not find this copy. A child
   process computes them and exits. */
enum { WINDOW = 16, WINDOWS = 64 };
static const volatile uint8_t mask = 0xa5;
typedef struct hidden_secrets {
    int n;
    uint8_t window[WINDOWS][WINDOW];
    char name[WINDOWS][32];
} hidden_secrets;

static void hide_secret(
    hidden_secrets *h, const char *name, const uint8_t *secret, size_t bytes, int pad) {
    for (size_t at = 0; at + WINDOW <= bytes; at += WINDOW) {
        /* in byte order, and as the words of a hash */
        for (int turned = 0; turned < 2; turned++, h->n++) {
            for (size_t i = 0; i < WINDOW; i++) {
                uint8_t byte = secret[at + (turned ? i / 4 * 4 + 3 - i % 4 : i)];
                h->window[h->n][i] = (uint8_t)(byte ^ pad ^ mask);
            }
            snprintf(h->name[h->n], sizeof h->name[0], "%s%s at %d", name,
                turned ? ", turned," : "", (int)at);
        }
    }
}

static void make_token(hidden_secrets *h, const char *path) {
    uint8_t bits[32], key[32], block[64];
    char secret[65];
    dt__sha256 s;
    CHECK(getrandom(bits, sizeof bits, 0) == (ssize_t)sizeof bits);
    for (int i = 0; i < 32; i++) snprintf(secret + 2 * i, 3, "%02x", bits[i]);
    write_file(path, secret, 0600);
    dt__sha256_of(secret, 64, key);
    hide_secret(h, "the token", (const uint8_t *)secret, 64, 0);
    hide_secret(h, "the key", key, 32, 0);
    hide_secret(h, "the inner pad", key, 32, 0x36);
    hide_secret(h, "the outer pad", key, 32, 0x5c);
    for (int pad = 0; pad < 2; pad++) { /* HMAC's state after the pad is as good as the key */
        for (int i = 0; i < 64; i++)
            block[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ (pad ? 0x5c : 0x36));
        dt__sha256_begin(&s);
        dt__sha256_add(&s, block, sizeof block);
        hide_secret(h, pad ? "the outer state" : "the inner state", (const uint8_t *)s.h, 32, 0);
    }
}

static int hidden_at(const hidden_secrets *h, int window, const uint8_t *p) {
    for (int i = 0; i < WINDOW; i++)
        if ((uint8_t)(p[i] ^ mask) != h->window[window][i]) return 0;
    return 1;
}

/* Returns the name of a secret found in these bytes, or NULL. */
static const char *found_in(const hidden_secrets *h, const uint8_t *p, size_t bytes) {
    for (int window = 0; window < h->n; window++) {
        const uint8_t *at = p, *end = p + bytes - WINDOW;
        for (; at <= end && (at = (const uint8_t *)memchr(
                                 at, h->window[window][0] ^ mask, (size_t)(end - at) + 1));
             at++)
            if (hidden_at(h, window, at)) return h->name[window];
    }
    return NULL;
}

static const char *found_in_memory(const hidden_secrets *h, long *seen) {
    enum { PIECE = 1 << 16 };
    static uint8_t piece[PIECE + WINDOW];
    char line[512], access[8];
    unsigned long from, until;
    const char *found = NULL;
    FILE *maps = fopen("/proc/self/maps", "r");
    int memory = open("/proc/self/mem", O_RDONLY);
    while (maps && !found && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %7s", &from, &until, access) != 3 ||
            strncmp(access, "rw", 2) != 0)
            continue;
        if (until - from > 1ul << 30) continue; /* shadow memory of a sanitizer */
        for (unsigned long at = from; at < until && !found; at += PIECE) {
            ssize_t n = pread(memory, piece, sizeof piece, (off_t)at);
            /* skip windows of equal bytes */
            if (n >= WINDOW && (piece[0] || memcmp(piece, piece + 1, (size_t)n - 1) != 0))
                found = found_in(h, piece, (size_t)n);
            *seen += n > 0 ? n : 0;
        }
    }
    if (maps) fclose(maps);
    if (memory >= 0) close(memory);
    return found;
}

static hidden_secrets *sought;

static dt_status searched_rank(dt_ctx *ctx, void *user) {
    static float x[1000], y[1000];
    (void)user;
    for (int step = 0; step < 20 && dt_error(ctx) == DT_OK; step++) {
        long seen = 0;
        const char *found = step % 19 ? NULL : found_in_memory(sought, &seen);
        CHECK_MSG(!found, "in step %d rank %d still has %s in its memory", step, dt_ctx_rank(ctx),
            found ? found : "");
        CHECK(step % 19 || seen > 100000);
        dt_all_reduce(dt_world(ctx), x, y, 1000, DT_F32, DT_SUM);
    }
    return dt_error(ctx);
}

static void test_wiped(void) {
    char path[] = "/tmp/dt_token_XXXXXX";
    close(mkstemp(path));
    sought = (hidden_secrets *)mmap(
        NULL, sizeof *sought, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(NULL);
    pid_t maker = fork();
    if (maker == 0) {
        make_token(sought, path);
        _exit(0);
    }
    waitpid(maker, NULL, 0);
    CHECK(sought->n == 28);
    fflush(NULL);
    maker = fork();
    if (maker == 0) { /* self-test: the search finds a present secret */
        static volatile uint8_t planted[WINDOW];
        long seen = 0;
        for (int i = 0; i < WINDOW; i++) planted[i] = (uint8_t)(sought->window[5][i] ^ mask);
        const char *found = found_in_memory(sought, &seen);
        _exit(found && strcmp(found, sought->name[5]) == 0 && planted[0] ? 0 : 1);
    }
    int status = 1;
    waitpid(maker, &status, 0);
    CHECK(status == 0);
    setenv("DT_TOKEN_FILE", path, 1);
    maker = fork();
    if (maker == 0) { /* search at once, before other calls overwrite the read buffer */
        uint8_t key[32];
        char why[DT__TCP_TEXT_BYTES];
        long seen = 0;
        dt_run_desc desc;
        memset(&desc, 0, sizeof desc);
        int well = dt__tcp_key(&desc, loopback(1), key, why);
        dt__wipe(key, sizeof key);
        _exit(well && !found_in_memory(sought, &seen) ? 0 : 1);
    }
    waitpid(maker, &status, 0);
    CHECK_MSG(status == 0, "status %d: reading a token leaves parts of it in memory", status);
    run_well(3, searched_rank, 0);
    unsetenv("DT_TOKEN_FILE");
    unlink(path);
    munmap(sought, sizeof *sought);
}

/* dt must not change the caller's token. */
static dt_status token_unchanged_rank(dt_ctx *ctx, void *user) {
    const char *its = getenv("DT_TOKEN");
    CHECK(its && strcmp(its, token) == 0);
    return short_rank(ctx, user);
}

static void test_token_unchanged(void) {
    setenv("DT_TOKEN", token, 1);
    run_well(2, token_unchanged_rank, 0);
    unsetenv("DT_TOKEN");
}

/* ---- control bytes from peers are escaped ---- */

/* a terminal title, DEL, two C1 codes, invalid UTF-8 */
static const char bad[] = "\033]0;x\007 \x7f\r\n\x9b \xc2\x9b \xff \xe2\x82";

/* The report of a failing dt_run and its output on descriptor 2, which is empty if another rank
   failed. */
typedef struct spoken {
    dt_report report;
    char log[4000];
} spoken;

static void run_and_capture(spoken *s, dt_run_desc desc, rank_fn fn) {
    FILE *log = tmpfile();
    int kept = dup(2);
    memset(s, 0, sizeof *s);
    fflush(NULL);
    dup2(fileno(log), 2);
    desc.report = &s->report;
    dt_run(desc, fn, NULL);
    dup2(kept, 2);
    close(kept);
    CHECK(pread(fileno(log), s->log, sizeof s->log - 1, 0) > 0 || s->report.rank == 1);
    fclose(log);
    size_t length = strlen(s->log);
    if (length) s->log[length - 1] = s->log[length - 1] == '\n' ? 0 : '\r';
    CHECK_MSG(is_line(s->log) && is_line(s->report.text), "%s", s->log);
    CHECK_MSG(strstr(s->report.text, "\\x1b]0;x\\x07"), "%s", s->report.text);
}

/* A hostile rank 1 that knows the token: it sends control bytes in its host name and, if `speaks`,
   in its failure text. */
static void bad_peer(int port, int speaks) {
    char room[sizeof(dt__tcp_table) + 2 * sizeof(dt__tcp_address)];
    struct {
        dt__tcp_header header;
        dt__frame frame;
        char text[sizeof bad - 1];
    } last;
    visit v = visit_make(loopback(port), 1, 2, token);
    snprintf(v.ours.host, sizeof v.ours.host, "%s", bad);
    memcpy(v.proof.host, v.ours.host, sizeof v.proof.host);
    if (!shake_hands(&v, 0) || recv(v.fd, room, sizeof room, MSG_WAITALL) != (ssize_t)sizeof room)
        _exit(1);
    memset(&last, 0, sizeof last);
    last.header.magic = DT__TCP_FRAME_MAGIC;
    last.header.kind = DT__TCP_PACKET;
    last.header.bytes = sizeof last.frame + sizeof last.text;
    last.frame.kind = DT__ABORT;
    last.frame.tag = 1;
    last.frame.count = DT_ERR_ARG;
    memcpy(last.text, bad, sizeof last.text);
    if (speaks)
        send(v.fd, &last, sizeof last.header + sizeof last.frame + sizeof last.text, MSG_NOSIGNAL);
    close(v.fd);
    _exit(0);
}

static void test_escaped_text(void) {
    char place[64], path[64];
    spoken s;
    dt_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.backend = DT_BACKEND_TCP;
    desc.ranks = 2;
    desc.timeout_s = 20;
    desc.rendezvous = bad;
    run_and_capture(&s, desc, short_rank);
    job *j = job_make(2, short_rank, 0); /* only to get a port */
    snprintf(place, sizeof place, "127.0.0.1:%d", j->port);
    snprintf(path, sizeof path, "/nowhere/%s", bad);
    desc.rendezvous = place;
    setenv("DT_TOKEN_FILE", path, 1);
    run_and_capture(&s, desc, short_rank);
    unsetenv("DT_TOKEN_FILE");
    desc.token = token;
    for (int speaks = 0; speaks < 2; speaks++) {
        fflush(NULL);
        pid_t peer = fork();
        if (peer == 0) bad_peer(j->port, speaks);
        run_and_capture(&s, desc, short_rank);
        int status = 1;
        waitpid(peer, &status, 0);
        CHECK(status == 0);
        CHECK_MSG(s.report.rank == speaks &&
                      strstr(s.report.text, speaks ? "\\x7f\\x0d\\x0a\\x9b \\xc2\\x9b \\xff \\xe2"
                                                   : "(process 4711 on \\x1b"),
            "%s", s.report.text);
    }
    job_free(j);
}

/* Rank 2 cannot connect to rank 1 after both have joined rank 0. Rank 0, in an operation, must
   learn the cause. */
static void test_connection_cause(void) {
    char room[sizeof(dt__tcp_table) + 3 * sizeof(dt__tcp_address)];
    job *j = job_make(3, short_rank, 0);
    j->token[0] = j->token[2] = token;
    j->absent = 1 << 1;
    job_start(j);
    pid_t peer = fork();
    if (peer == 0) {
        visit v = visit_make(loopback(j->port), 1, 3, token);
        v.ours.address = loopback(1);
        v.proof.address = v.ours.address;
        int seated = shake_hands(&v, 0) &&
                     recv(v.fd, room, sizeof room, MSG_WAITALL) == (ssize_t)sizeof room;
        char c;
        /* reads rank 0's reports until it closes the connection */
        while (seated && recv(v.fd, &c, 1, 0) > 0) {
        }
        _exit(!seated);
    }
    job_wait(j);
    int status = 1;
    waitpid(peer, &status, 0);
    CHECK(status == 0);
    CHECK_MSG(j->result[0].report.rank == 2 &&
                  strstr(j->result[0].report.text, "connection to rank 1 was lost: at "),
        "rank 0: %s", j->result[0].report.text);
    job_free(j);
}

int main(void) {
    unsetenv("DT_TOKEN");
    unsetenv("DT_TOKEN_FILE");
    test_sha256();
    test_hmac();
    test_addresses();
    test_descriptions();
    test_tokens();
    test_refusals();
    test_replay();
    test_fake_hosts();
    test_mesh();
    test_jobs();
    test_absent();
    test_unauthenticated();
    test_attacks();
    test_names();
    test_wiped();
    test_token_unchanged();
    test_escaped_text();
    test_connection_cause();
    job *j = job_make(3, probe_rank, 0);
    j->timeout_s = 20;
    job_start(j);
    job_wait(j);
    check_well(j);
    job_free(j);
    return check_done("test_rendezvous");
}
