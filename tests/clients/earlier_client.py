#!/usr/bin/env python3
"""A client of the day on which version 1 was frozen: a copy of examples/protocol_client.py.

Every later server must train it. Its digest is part of the list of revisions: it is never edited.
"""

import argparse
import hashlib
import hmac
import os
import random
import socket
import ssl
import struct
import sys
import time

# --- Frames ---------------------------------------------------------------------------------------

HEADER = struct.Struct("<4sHHIIQQIIQQIIQII")
VERSION = 1
PART_BYTES_MAX = 1 << 20
HAS_BODY_CRC = 1

HELLO, WELCOME, REFUSED = 1, 2, 3
DECLARE, DECLARED, INITIALIZE, AWAIT_READY, READY, FETCH_CATALOGUE, CATALOGUE_IS = range(10, 17)
TOKEN_REQUEST, GRANTED, ENDED = 20, 21, 22
RESERVE, RESERVED, PUSH_PART, PUSH_ANSWER = 30, 31, 32, 33
OUTCOME_QUERY, OUTCOME_IS = 35, 36
PULL, PULLED, PULL_ROWS, ROWS = 40, 41, 42, 43
LEAVE, LEFT = 52, 53
CHALLENGE, CHALLENGE_ANSWER = 78, 79

WORKER, CHIEF = 1, 2
GRADIENT = 1
APPLIED, ACCEPTED, STALE = 1, 2, 3
UNKNOWN, RECEIVING, SETTLED = 1, 2, 3
ALL, PARTITIONS = 1, 2
UNKNOWN_PARTITION = 9
IS_ABSENT, IS_READY = 1, 3
F32 = 1
ZEROS = 1
TRAINED = 1


def crc_table():
    """Returns the remainder of each byte modulo the polynomial of CRC-32C, bits reflected."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


class ProtocolError(Exception):
    """The server violated the protocol."""


class Refused(Exception):
    """The server refused a request."""

    def __init__(self, tag, rest):
        super().__init__(f"refusal {tag} (see docs/protocol.md), fields {rest.hex() or 'none'}")
        self.tag = tag


class Fields:
    """A reader of the fields of a meta, in order."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0] if len(values) == 1 else values

    def bool(self):
        value = self.take("B")
        if value > 1:
            raise ProtocolError(f"invalid bool {value}")
        return value == 1

    def bytes(self, count):
        self.at += count
        if self.at > len(self.data):
            raise ProtocolError("the fields end early")
        return self.data[self.at - count : self.at]

    def text(self):
        return self.bytes(self.take("H")).decode()

    def rest(self):
        return self.bytes(len(self.data) - self.at)

    def end(self):
        if self.at != len(self.data):
            raise ProtocolError(f"{len(self.data) - self.at} bytes after the last field")


def text(value):
    return struct.pack("<H", len(value.encode())) + value.encode()


class Credentials:
    """What the client proves itself with: an access token, or a certificate over TLS."""

    def __init__(self, tokens=None, authority=None, certificate=None, key=None):
        self.token, self.tls = None, None
        if tokens:
            # The first entry. A real client takes the first that suits its role and its task.
            entries = (line.split() for line in open(tokens, encoding="utf-8"))
            _, name, secret = next(entry for entry in entries if entry[:1] == ["token"])[:3]
            self.token = name, bytes.fromhex(secret)
        if authority:
            self.tls = ssl.create_default_context(cafile=authority)
            self.tls.minimum_version = ssl.TLSVersion.TLSv1_3
            self.tls.set_alpn_protocols(["pushpull/1"])
            if certificate:
                self.tls.load_cert_chain(certificate, key)

    def secure(self, connection, host):
        return self.tls.wrap_socket(connection, server_hostname=host) if self.tls else connection


def connect(address, credentials):
    """Connects to the server. Retries for 10 s while it is starting."""
    for attempt in range(100):
        try:
            if address.startswith("unix:"):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(address[len("unix:") :])
                return connection
            host, port = address.rsplit(":", 1)
            connection = socket.create_connection((host, int(port)))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return credentials.secure(connection, host)
        except (ConnectionRefusedError, FileNotFoundError):
            if attempt == 99:
                raise
            time.sleep(0.1)


class Connection:
    """A connection that sends and receives frames, with one request at a time."""

    def __init__(self, address, credentials):
        self.socket = connect(address, credentials)
        self.token = credentials.token
        self.socket.settimeout(60)
        self.request = 0
        self.restore_epoch = 0

    def send(self, kind, meta=b"", body=b"", step=0, sequence=0, deadline_ms=30_000):
        self.request += 1
        head = HEADER.pack(
            b"ppsh", VERSION, kind, len(meta), 0, len(body), self.request, self.restore_epoch, 0, step,
            sequence, deadline_ms, 0, 0, crc32c(meta), 0,
        )
        head = head[:-4] + struct.pack("<I", crc32c(head[:-4]))
        self.sent = head + meta
        self.socket.sendall(self.sent + body)
        return self.request

    def receive(self, request):
        """Reads the next frame, which must answer this request. Returns its kind, step, fields and body."""
        head = self.exactly(HEADER.size)
        (magic, version, kind, meta_bytes, flags, body_bytes, answered, epoch, _, step, _, _,
         body_crc, _, meta_crc, header_crc) = HEADER.unpack(head)
        if magic != b"ppsh" or header_crc != crc32c(head[:-4]) or version != VERSION:
            raise ProtocolError("invalid header")
        meta = self.exactly(meta_bytes)
        if meta_crc != crc32c(meta):
            raise ProtocolError("the checksum of the meta does not match")
        body = self.exactly(body_bytes)
        if flags & HAS_BODY_CRC and body_crc != crc32c(body):
            raise ProtocolError("the checksum of the body does not match")
        fields = Fields(meta)
        # A refusal of a push may answer any part, not only the last.
        if kind == REFUSED:
            raise Refused(fields.take("B"), fields.rest())
        if answered != request:
            raise ProtocolError(f"expected an answer to request {request}, received one to {answered}")
        # Answers name the current restore epoch, and every request repeats it.
        self.restore_epoch = epoch
        return kind, step, fields, body

    def ask(self, kind, answers, *rest, **options):
        """Sends a request and waits for an answer of one of these kinds."""
        found, step, fields, body = self.receive(self.send(kind, *rest, **options))
        if found not in answers:
            raise ProtocolError(f"unexpected kind {found} in answer to {kind}")
        return found, step, fields, body

    def say_hello(self, before, after):
        """Says hello with these fields, and proves that the client knows its token. Returns the fields
        of the welcome."""
        auth = b"\0"
        if self.token:
            name, secret = self.token
            auth = b"\1" + text(name) + os.urandom(32)
        request = self.send(HELLO, before + auth + after)
        hello = hashlib.sha256(self.sent).digest()
        kind, _, fields, _ = self.receive(request)
        if self.token:
            if kind != CHALLENGE:
                raise ProtocolError("the server has not asked for a proof")
            nonce, proof = fields.bytes(32), fields.bytes(32)

            # Over TLS the last 32 bytes are exported from the channel, which Python cannot do.
            def prove(side):
                return hmac.digest(secret, b"pushpull 1 " + side + hello + nonce + bytes(32), "sha256")

            if not hmac.compare_digest(proof, prove(b"server")):
                raise ProtocolError(f"the server does not prove that it knows the token {name}")
            self.send(CHALLENGE_ANSWER, prove(b"client"))
            kind, _, fields, _ = self.receive(request)
        if kind != WELCOME:
            raise ProtocolError(f"unexpected kind {kind} in answer to a hello")
        return fields

    def exactly(self, count):
        parts = bytearray()
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            if not part:
                raise ProtocolError("the server closed the connection")
            parts += part
        return bytes(parts)


# --- Variables ------------------------------------------------------------------------------------


class Variable:
    """A trained variable of f32 and its offset in the layout of the shard."""

    def __init__(self, name, extents, offset=0, sparse=False):
        self.name, self.extents, self.offset, self.sparse = name, extents, offset, sparse

    @property
    def count(self):
        count = 1
        for extent in self.extents:
            count *= extent
        return count

    @property
    def padded_bytes(self):
        return (4 * self.count + 7) // 8 * 8

    @property
    def width(self):
        """The number of elements in a row."""
        return self.count // self.extents[0]

    def values(self, layout):
        return list(struct.unpack_from(f"<{self.count}f", layout, self.offset))


def padded(data):
    return data.ljust((len(data) + 7) // 8 * 8, b"\0")


def packed(values):
    return struct.pack(f"<{len(values)}f", *values)


def encode_catalogue(variables):
    out = struct.pack("<HI", 2, len(variables))
    for variable in variables:
        out += text(variable.name) + struct.pack("<BB", F32, len(variable.extents))
        out += b"".join(struct.pack("<Q", extent) for extent in variable.extents)
        # Trained, dense or sparse, initialized to zeros (which ignores the two numbers), with a
        # seed of 0.
        out += struct.pack("<BBBddQ", TRAINED, variable.sparse, ZEROS, 0.0, 0.0, 0)
    out += struct.pack("<I", len(variables))
    for number, variable in enumerate(variables):
        # One partition with all rows, on shard 0 of task 0. A scalar has one row.
        rows = variable.extents[0] if variable.extents else 1
        out += struct.pack("<IQQIH", number, 0, rows, 0, 0)
    return out


def decode_catalogue(data):
    fields = Fields(data)
    if fields.take("H") != 2:
        raise ProtocolError("unknown format of the catalogue")
    variables, end = [], 0
    for _ in range(fields.take("I")):
        name, dtype, rank = fields.text(), fields.take("B"), fields.take("B")
        extents = [fields.take("Q") for _ in range(rank)]
        update, rows = fields.take("B"), fields.take("B")
        if dtype != F32 or rows > 1 or update != TRAINED:
            sys.exit(f"{name!r} is not a trained variable of f32: this client supports no others")
        fields.take("BddQ")
        variables.append(Variable(name, extents, end, rows == 1))
        end += variables[-1].padded_bytes
    for number in range(fields.take("I")):
        variable, _, _, task, shard = fields.take("IQQIH")
        if (variable, task, shard) != (number, 0, 0):
            sys.exit("a variable is partitioned or on another shard: this client supports one shard")
    fields.end()
    return variables


# --- A worker -------------------------------------------------------------------------------------


class Worker:
    """A worker or chief that has joined."""

    def __init__(self, address, credentials, job, task, role, declared):
        self.address, self.credentials = address, credentials
        self.job, self.task, self.role = job, task, role
        # A new client has a new incarnation and no client epoch.
        self.incarnation, self.epoch = random.getrandbits(64), 0
        self.sequence = 0
        state = self.join()
        if role == CHIEF and state != IS_READY:
            encoded = encode_catalogue(declared)
            self.connection.ask(DECLARE, [DECLARED], hashlib.sha256(encoded).digest(), encoded)
            begins = struct.pack("<I", self.connection.restore_epoch + 1)
            self.connection.ask(INITIALIZE, [READY], begins)
        self.connection.ask(AWAIT_READY, [READY])
        _, _, fields, encoded = self.connection.ask(FETCH_CATALOGUE, [CATALOGUE_IS])
        if fields.bytes(32) != hashlib.sha256(encoded).digest():
            raise ProtocolError("the digest of the catalogue does not match")
        self.variables = decode_catalogue(encoded)
        self.push_slot = self.newest = 0
        self.ask_for_a_token()

    def join(self, restore_epoch=0):
        """Says hello over a new connection. Returns the state of the catalogue on the server."""
        self.connection = Connection(self.address, self.credentials)
        self.connection.restore_epoch = restore_epoch
        hello = struct.pack("<HHB", VERSION, VERSION, self.role) + text(self.job)
        hello += struct.pack("<IIH", self.task, 0, 0)
        # The arena tells the epoch that it has joined from one of a state that was lost.
        arena = self.arena if restore_epoch else 0
        hello += struct.pack("<QQIQQ", self.incarnation, self.epoch, restore_epoch, 0, arena)
        # No catalogue digest; checksums of bodies off; an empty identity.
        hello += struct.pack("<BBI", 0, 2, 0)
        # It has no features, so no message has fields that belong to one; it requires none.
        fields = self.connection.say_hello(hello, struct.pack("<QQ", 0, 0))
        _, _, self.epoch = fields.take("HHQ")
        self.synchronous = fields.take("B") == 2
        fields.bytes(8 if self.synchronous else 1)
        fields.take("IIBBQ")
        state = fields.take("B")
        fields.bytes(32 if state != IS_ABSENT else 0)
        _, _, self.arena = fields.take("IQQ")
        return state

    def ask_for_a_token(self):
        """Waits for a token, or for the end of training."""
        self.token = None
        newest = struct.pack("<Q", self.newest)
        kind, _, fields, _ = self.connection.ask(TOKEN_REQUEST, [GRANTED, ENDED], newest)
        if kind == GRANTED:
            self.take_grant(fields)

    def take_grant(self, fields):
        self.token, self.generation, self.step, push_slot = fields.take("QIQI")
        # This client declares no data set, so its grants name no samples.
        if fields.bool():
            fields.take("QQI")
        self.newest, self.push_slot = self.token, push_slot or self.push_slot

    def pull(self):
        """Pulls all variables at one version. Returns their bytes, or None once training has ended."""
        while self.token is not None:
            layout, step = self.pull_once()
            # In synchronous mode the step may be over before its values were pulled. The token is
            # stale then.
            if step == self.step or not self.synchronous:
                return layout
            self.ask_for_a_token()
        return None

    def pull_once(self):
        layout, last = bytearray(), False
        request = self.connection.send(PULL, struct.pack("<B", ALL), step=self.step)
        while not last:
            kind, step, fields, body = self.connection.receive(request)
            if kind != PULLED:
                raise ProtocolError(f"unexpected kind {kind} in answer to a pull")
            _, self.read, offset = fields.take("QQQ")
            last = fields.bool()
            if offset != len(layout):
                raise ProtocolError("a gap between the parts of a pull")
            layout += body
        return bytes(layout), step

    def pull_rows(self, number, rows):
        """Pulls rows of the variable with this number, in this order."""
        numbers = struct.pack(f"<{len(rows)}I", *rows)
        meta = struct.pack("<I", number)
        _, _, fields, body = self.connection.ask(PULL_ROWS, [ROWS], meta, numbers, step=self.step)
        fields.take("QQ")
        fields.end()
        return list(struct.unpack(f"<{len(body) // 4}f", body))

    def is_refused(self, partition):
        """Returns whether a pull of this partition is refused as unknown."""
        try:
            self.connection.ask(PULL, [PULLED], struct.pack("<BII", PARTITIONS, 1, partition))
        except Refused as refused:
            return refused.tag == UNKNOWN_PARTITION
        return False

    def ranges_of(self, gradients):
        """Returns the ranges of the layout to push: all of a dense variable, the numbered rows of a sparse one."""
        end = self.variables[-1].offset + self.variables[-1].padded_bytes
        ranges = []
        for variable, gradient in zip(self.variables, gradients):
            if not variable.sparse:
                ranges.append((variable.offset, padded(packed(gradient))))
                continue
            numbers = sorted(gradient)
            rows = b"".join(packed(gradient[row]) for row in numbers)
            ranges.append((variable.offset, padded(rows)))
            ranges.append((end, padded(struct.pack(f"<Q{len(numbers)}I", len(numbers), *numbers))))
            end += (8 + 4 * variable.extents[0] + 7) // 8 * 8
        return [(start, data) for start, data in ranges if data]

    def parts_of(self, ranges):
        """Returns the parts of a push: start, bytes, and for the last part the number of bytes of all parts."""
        total = sum(len(data) for _, data in ranges)
        parts = []
        for offset, data in ranges:
            for start in range(0, len(data), PART_BYTES_MAX):
                parts.append((offset + start, data[start : start + PART_BYTES_MAX], None))
        parts[-1] = parts[-1][:2] + (total,)
        return parts

    def send_parts(self, parts):
        """Sends parts of the current push. Returns the request id of the last part."""
        if self.push_slot == 0:
            self.push_slot = self.connection.ask(RESERVE, [RESERVED])[2].take("I")
        request = None
        for start, part, whole in parts:
            meta = struct.pack("<BQIIQ", GRADIENT, self.token, self.generation, self.push_slot, start)
            meta += struct.pack("<B", 0) if whole is None else struct.pack("<BQ", 1, whole)
            # Request the next token with the answer, and name the number of gradients in the values
            # read.
            meta += struct.pack("<BBQ", 1, 1, self.read)
            request = self.connection.send(PUSH_PART, meta, part, step=self.step, sequence=self.sequence)
        return request

    def push(self, gradients, cut=None):
        """Pushes a gradient of each variable under the token and takes the next token. Returns the staleness.

        If `cut` is a number, the connection is dropped after that many parts, before any answer."""
        parts = self.parts_of(self.ranges_of(gradients))
        self.sequence += 1
        if cut is not None:
            self.send_parts(parts[:cut])
            return self.resume_push(parts)
        return self.receive_outcome(self.send_parts(parts))

    def resume_push(self, parts):
        """Reconnects, asks for the outcome of a push, and sends it again if the server lacks a part."""
        self.connection.socket.close()
        self.join(self.connection.restore_epoch)
        _, _, fields, _ = self.connection.ask(OUTCOME_QUERY, [OUTCOME_IS], sequence=self.sequence)
        state = fields.take("B")
        if state == SETTLED:
            staleness = self.outcome(fields)
            self.push_slot, self.token = 0, None
            self.ask_for_a_token()
            return staleness
        total = parts[-1][2]
        if state == RECEIVING and fields.take("Q") == total:
            # The server has all bytes: an empty last part repeats the total.
            return self.receive_outcome(self.send_parts([(0, b"", total)]))
        if state not in (UNKNOWN, RECEIVING):
            raise ProtocolError(f"unexpected state {state} of a push")
        self.push_slot = 0
        return self.receive_outcome(self.send_parts(parts))

    def outcome(self, fields):
        """Reads an outcome. Returns the staleness of the gradient."""
        outcome = fields.take("B")
        if outcome == APPLIED:
            return fields.take("QQQ")[2]
        if outcome not in (ACCEPTED, STALE):
            raise ProtocolError(f"unexpected outcome {outcome} of a push")
        fields.take("Q")
        return 0

    def receive_outcome(self, request):
        """Waits for the answer to a push. Returns the staleness of the gradient."""
        kind, _, fields, _ = self.connection.receive(request)
        if kind != PUSH_ANSWER:
            raise ProtocolError(f"unexpected kind {kind} in answer to a push")
        staleness = self.outcome(fields)
        fields.bool()
        self.push_slot, self.token = 0, None
        if fields.bool():
            self.take_grant(fields)
        has_ended = fields.bool()
        if has_ended:
            fields.take("B")
        self.push_slot = fields.take("I") or self.push_slot
        fields.end()
        if self.token is None and not has_ended:
            self.ask_for_a_token()
        return staleness

    def leave(self):
        self.connection.ask(LEAVE, [LEFT])


# --- The model ------------------------------------------------------------------------------------


# Exit status if the values on the server differ from the expected ones.
DIFFERS = 3


def f32(value):
    """Rounds a number to f32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def gradient_of(weights, bias, rows):
    """Returns the gradient of half the mean squared error of a line through these rows, and that error."""
    slope, shift, loss = [0.0] * len(weights), 0.0, 0.0
    for inputs, target in rows:
        error = sum(w * x for w, x in zip(weights, inputs)) + bias - target
        slope = [s + error * x / len(rows) for s, x in zip(slope, inputs)]
        shift += error / len(rows)
        loss += error * error / (2 * len(rows))
    return slope, shift, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="host:port, or unix:/path")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.01, help="learning rate of the server")
    parser.add_argument("--cut-every", "--cut_every", type=int, default=0, help="drop the connection in every N-th push; 0 never")
    parser.add_argument("--job", "--job_name", "--job-name", default="worker")
    parser.add_argument("--task", "--task_index", "--task-index", type=int, default=0)
    parser.add_argument("--tokens", help="file of access tokens, of which the first is used")
    parser.add_argument("--tls-ca", "--tls_ca", help="certificates of the authority: the client speaks TLS")
    parser.add_argument("--tls-cert", "--tls_cert", help="certificate of the client")
    parser.add_argument("--tls-key", "--tls_key", help="its key")
    options = parser.parse_args()
    credentials = Credentials(options.tokens, options.tls_ca, options.tls_cert, options.tls_key)

    declared = [Variable("line/weights", [3]), Variable("line/bias", [1])]
    declared.append(Variable("words", [6, 2], sparse=True))
    role = CHIEF if options.task == 0 else WORKER
    worker = Worker(options.address, credentials, options.job, options.task, role, declared)
    names = [variable.name for variable in worker.variables]
    if names != [variable.name for variable in declared]:
        sys.exit(f"the server has the variables {names}, not those of this client")

    chance = random.Random(1)
    inputs = [[chance.gauss(0, 1) for _ in range(3)] for _ in range(64)]
    rows = [(x, 2 * x[0] - x[1] + 0.5 * x[2] + 3) for x in inputs]
    weights, bias, words = worker.variables
    if not worker.is_refused(99):
        sys.exit("a pull of an unknown partition is not refused as unknown")
    expected, read, loss = None, 0, 0.0
    for step in range(options.steps):
        layout = worker.pull()
        if layout is None:
            print("training has ended")
            break
        pulled = weights.values(layout) + bias.values(layout) + words.values(layout)
        # The expected values come from gradient descent in this file. They hold if nobody else
        # pushed meanwhile.
        if expected is not None and worker.read == read + 1 and expected != pulled:
            print(f"step {step}: the server has {pulled}, expected {expected}")
            sys.exit(DIFFERS)
        slope, shift, loss = gradient_of(pulled[:3], pulled[3], rows)
        gradient = [f32(g) for g in slope + [shift]]
        # Move two rows of `words` towards their targets: the row number, and half of it.
        row_gradients = {}
        for row in sorted([step % 6, (step + 2) % 6]):
            start = len(gradient) + row * words.width
            current, target = pulled[start : start + words.width], [row, row / 2]
            row_gradients[row] = [f32(w - t) for w, t in zip(current, target)]
        whole = gradient + [g for row in range(6) for g in row_gradients.get(row, [0.0, 0.0])]
        rate = f32(options.learning_rate)
        expected = [f32(w - f32(rate * g)) for w, g in zip(pulled, whole)]
        cut = None
        if options.cut_every and step % options.cut_every == 1:
            # Cut before the first part, between parts, or after the last.
            cut = step // options.cut_every % 5
        gradients = [gradient[:3], gradient[3:], row_gradients]
        read, staleness = worker.read, worker.push(gradients, cut)
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.6f}, staleness {staleness}")
        if step % 7 == 3 and worker.token is not None:
            found = worker.pull_rows(2, [4, 1])
            layout = worker.pull()
            values = words.values(layout) if layout else []
            is_alone = worker.read == read + 1
            if is_alone and found != values[8:10] + values[2:4]:
                print(f"step {step}: pulled rows {found}, but all values are {values}")
                sys.exit(DIFFERS)
    print(f"loss {loss:.6f}, weights {[round(w, 3) for w in expected[:3]]}, bias {expected[3]:.3f}")
    worker.leave()


if __name__ == "__main__":
    main()
