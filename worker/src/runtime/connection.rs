//! One connection to a shard, from connecting to closing, with its send queue.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{
    BodyPoll, BodyStamp, Envelope, FrameReader, Message, Poll, encode,
};
use pushpull_net::Stream;
use tokio::io::Interest;
use tokio::sync::Notify;

use super::thread::SessionCore;
use crate::gradients::parts::FrameBody;
use crate::session::SessionInput;

/// The limit on one attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The frames that one connection reads before it yields to the others.
const FRAMES_PER_ROUND: usize = 16;

/// Connects and exchanges frames until the connection ends. Then reports the end to the session,
/// unless the session has given the connection up.
pub(super) async fn run(
    core: Arc<SessionCore>,
    link: usize,
    address: String,
    outbox: Arc<LinkOutbox>,
) {
    let error = match tokio::time::timeout(CONNECT_TIMEOUT, Stream::connect(&address)).await {
        Err(_) => format!("no connection within {CONNECT_TIMEOUT:?}"),
        Ok(Err(error)) => error.to_string(),
        Ok(Ok(stream)) => match converse(&core, link, &stream, &outbox).await {
            Ok(()) => "the server has closed the connection".to_owned(),
            Err(error) => error.to_string(),
        },
    };
    core.sharing_ended(link, &outbox);
    if !outbox.is_given_up() {
        core.handle(SessionInput::Disconnected { link, error });
    }
}

async fn converse(
    core: &SessionCore,
    link: usize,
    stream: &Stream,
    outbox: &LinkOutbox,
) -> Result<(), ReadError> {
    let mut reader = FrameReader::new();
    // The configuration names the server, so it is trusted: its metas may have any length.
    reader.open();
    let mut in_body = false;
    if !outbox.is_given_up() {
        core.handle(SessionInput::Connected { link, same_host: stream.passes_descriptors() });
    }
    loop {
        if outbox.flush(stream)? {
            core.handle(SessionInput::BytesSent { link });
        }
        match read_frames(core, link, stream, outbox, &mut reader, &mut in_body)? {
            ReadEnd::Closed => return Ok(()),
            ReadEnd::Yield => {
                tokio::task::yield_now().await;
                continue;
            }
            ReadEnd::Blocked => {}
        }
        // The frames just read may have queued responses.
        if outbox.flush(stream)? {
            core.handle(SessionInput::BytesSent { link });
        }
        if outbox.is_given_up() {
            return Ok(());
        }
        let interest = match outbox.is_empty() {
            true => Interest::READABLE,
            false => Interest::READABLE | Interest::WRITABLE,
        };
        tokio::select! {
            biased;
            ready = stream.ready(interest) => { ready?; }
            () = outbox.changed() => {}
        }
    }
}

/// Why a round of reads ended.
enum ReadEnd {
    /// The socket has no more data.
    Blocked,
    /// The connection has read its share of frames and yields.
    Yield,
    /// The peer has closed the stream.
    Closed,
}

fn read_frames(
    core: &SessionCore,
    link: usize,
    stream: &Stream,
    outbox: &LinkOutbox,
    reader: &mut FrameReader,
    in_body: &mut bool,
) -> Result<ReadEnd, ReadError> {
    let mut source =
        |slices: &mut [IoSliceMut<'_>]| stream.try_read(slices, |fd| outbox.keep_descriptor(fd));
    for _ in 0..FRAMES_PER_ROUND {
        if outbox.is_given_up() {
            return Ok(ReadEnd::Blocked);
        }
        if *in_body {
            let before = reader.bytes();
            let poll = core.with_body(link, |targets| match targets {
                Some(targets) => reader.poll_body_scattered(&mut source, targets),
                None => reader.skip_body(&mut source),
            })?;
            match poll {
                BodyPoll::Done => {
                    *in_body = false;
                    core.handle(SessionInput::Body { link });
                }
                BodyPoll::Pending => {
                    if reader.bytes() != before {
                        core.handle(SessionInput::BytesReceived { link });
                    }
                    return Ok(ReadEnd::Blocked);
                }
            }
            continue;
        }
        match reader.poll(&mut source)? {
            Poll::Pending => return Ok(ReadEnd::Blocked),
            Poll::Closed => return Ok(ReadEnd::Closed),
            Poll::Frame(header, message) => {
                *in_body = header.body_bytes > 0;
                core.handle(SessionInput::Message { link, header, message });
            }
        }
    }
    Ok(ReadEnd::Yield)
}

/// The most slices in one vectored write: parts of one large frame, or several small frames.
const SLICES_MAX: usize = 64;

/// The most received descriptors that are kept until they are taken; others are closed.
const DESCRIPTORS_MAX: usize = 4;

/// The head buffers that are kept for reuse: usually as many as a connection has in flight.
const HEADS_MAX: usize = 64;

/// The initial capacity of a head buffer. The heads of all frequent frames fit.
const HEAD_BYTES: usize = 256;

/// The sending side of one connection, shared between its task and the session's outputs.
#[derive(Debug, Default)]
pub(super) struct LinkOutbox {
    frames: Mutex<Frames>,
    /// Whether the last write blocked: the peer must read first.
    full: AtomicBool,
    notify: Notify,
    /// Whether the session has given the connection up. Its end is not reported then.
    given_up: AtomicBool,
    /// Received descriptors that have not been taken yet.
    descriptors: Mutex<Vec<OwnedFd>>,
}

impl LinkOutbox {
    fn frames(&self) -> MutexGuard<'_, Frames> {
        lock(&self.frames)
    }

    pub(super) fn push(&self, envelope: &Envelope, message: &Message, body: FrameBody, crc: bool) {
        self.frames().push(envelope, message, body, crc);
        self.notify.notify_one();
    }

    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Keeps a received descriptor for the handler of its frame. Closes it if [`DESCRIPTORS_MAX`]
    /// wait already; the session never asks for that many.
    pub(super) fn keep_descriptor(&self, descriptor: OwnedFd) {
        let mut descriptors = lock(&self.descriptors);
        if descriptors.len() < DESCRIPTORS_MAX {
            descriptors.push(descriptor);
        }
    }

    /// Takes the received descriptors.
    pub(super) fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *lock(&self.descriptors))
    }

    /// Waits until a frame is queued or the connection is given up.
    pub(super) async fn changed(&self) {
        self.notify.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames().queue.is_empty()
    }

    /// Writes as much as the socket takes. Returns whether it took bytes after a write had blocked,
    /// which shows that the peer has read. Other writes show nothing about the peer.
    pub(super) fn flush(&self, stream: &Stream) -> io::Result<bool> {
        let mut frames = self.frames();
        let mut drained = false;
        while !frames.queue.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = frames.unsent(&mut slices);
            match stream.try_write(&slices[..count]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    frames.consume_sent(count);
                    drained |= self.full.swap(false, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.full.store(true, Ordering::Relaxed);
                    return Ok(drained);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(drained)
    }
}

/// Locks, ignoring poison: a panic under the lock ends the session, and nothing more is sent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A frame to send.
#[derive(Debug)]
struct Frame {
    head: Vec<u8>,
    body: FrameBody,
    /// The length of head and body.
    bytes: usize,
}

/// Frames in the order in which they are sent.
#[derive(Debug, Default)]
struct Frames {
    queue: VecDeque<Frame>,
    /// The bytes of the first frame that have been sent.
    sent: usize,
    /// Head buffers of sent frames, for reuse.
    heads: Vec<Vec<u8>>,
}

impl Frames {
    fn push(&mut self, envelope: &Envelope, message: &Message, body: FrameBody, crc: bool) {
        let bytes = body.bytes();
        let checksum = || body.slices().fold(0, crc32c::crc32c_append);
        let stamp = BodyStamp { bytes, crc: (crc && bytes > 0).then(checksum) };
        let reused = self.heads.pop();
        let mut head = reused.unwrap_or_else(|| Vec::with_capacity(HEAD_BYTES));
        encode(&mut head, envelope, message, stamp);
        let bytes = head.len() + bytes as usize;
        self.queue.push_back(Frame { head, body, bytes });
    }

    /// Fills `slices` with the next unsent bytes, in order. Returns the number of slices filled.
    fn unsent<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let (mut skip, mut count) = (self.sent, 0);
        let all = self
            .queue
            .iter()
            .flat_map(|frame| std::iter::once(&frame.head[..]).chain(frame.body.slices()));
        for slice in all {
            if count == slices.len() {
                break;
            }
            if skip >= slice.len() {
                skip -= slice.len();
                continue;
            }
            slices[count] = IoSlice::new(&slice[std::mem::take(&mut skip)..]);
            count += 1;
        }
        count
    }

    /// Removes this many sent bytes from the queue.
    fn consume_sent(&mut self, bytes: usize) {
        self.sent += bytes;
        while let Some(first) = self.queue.front()
            && self.sent >= first.bytes
        {
            self.sent -= first.bytes;
            let mut head = self.queue.pop_front().map_or_else(Vec::new, |frame| frame.head);
            head.clear();
            if self.heads.len() < HEADS_MAX {
                self.heads.push(head);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use pushpull_common::protocol::message::Heartbeat;

    use super::*;

    fn body(index: usize) -> FrameBody {
        let chunk = |length: usize| Bytes::from(vec![index as u8; length]);
        match index % 3 {
            0 => FrameBody::Empty,
            1 => chunk(5 * index).into(),
            // A frame may have more slices than one write takes.
            _ => (0..100 + index).map(|_| chunk(1 + index % 4)).collect(),
        }
    }

    #[test]
    fn partial_writes_send_whole_frames_in_order() {
        for most in [1, 7, 80, 81, 333, 1 << 20] {
            let (mut frames, mut expected, mut sent) = (Frames::default(), Vec::new(), Vec::new());
            for index in 0..40 {
                let (envelope, message) = (Envelope::default(), Heartbeat {}.into());
                frames.push(&envelope, &message, body(index), index % 2 == 0);
                let last = frames.queue.back().unwrap();
                expected.extend_from_slice(&last.head);
                expected.extend(last.body.concat());
                assert_eq!(last.bytes, last.head.len() + last.body.concat().len());
            }
            while !frames.queue.is_empty() {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let count = frames.unsent(&mut slices);
                assert!(slices[..count].iter().all(|slice| !slice.is_empty()));
                let bytes: Vec<u8> = slices[..count]
                    .iter()
                    .flat_map(|slice| slice.iter())
                    .copied()
                    .take(most)
                    .collect();
                assert!(!bytes.is_empty(), "no bytes to write");
                frames.consume_sent(bytes.len());
                sent.extend(bytes);
            }
            assert!(sent == expected && frames.sent == 0, "{most} bytes per write");
        }
    }

    #[test]
    fn small_frames_share_a_write_and_their_heads_are_reused() {
        let mut frames = Frames::default();
        for _ in 0..10 {
            frames.push(&Envelope::default(), &Heartbeat {}.into(), FrameBody::Empty, false);
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        assert_eq!(frames.unsent(&mut slices), 10);
        let first = frames.queue[0].head.as_ptr();
        frames.consume_sent(frames.queue[0].bytes);
        frames.push(&Envelope::default(), &Heartbeat {}.into(), FrameBody::Empty, false);
        assert_eq!(frames.queue.back().unwrap().head.as_ptr(), first);
    }
}
