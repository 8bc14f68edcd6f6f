//! The send queue of a connection: frames in order, written with vectored writes.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use pushpull_common::protocol::{BodyStamp, Envelope, Features, Message, encode_for};

use crate::Stream;

/// The body of a queued frame, in memory that its owner may take back after the send.
pub trait SendBody {
    /// Returns its length in bytes.
    fn bytes(&self) -> u64;

    /// Returns its slices in order.
    fn slices(&self) -> impl Iterator<Item = &[u8]>;

    /// Appends the header and meta of the next frame of a stream to `head`, and makes its body the
    /// current one. `features` are agreed with the peer. Returns false after the last frame.
    fn next_frame(&mut self, features: Features, head: &mut Vec<u8>) -> bool {
        let _ = (features, head);
        false
    }
}

/// Frames in the order in which they are sent.
///
/// A *stream* is an item of several frames. Each is encoded when all earlier bytes are sent, so a
/// queued stream needs no memory for its frames.
///
/// Invariants: `sent` is less than the length of the first frame. A stream is encoded only while it
/// is the first item.
#[derive(Debug)]
pub struct SendQueue<B> {
    queue: VecDeque<QueuedFrame<B>>,
    /// The bytes of the first frame that have been sent.
    sent: usize,
    /// Whether the last write blocked: the peer must read first.
    blocked: bool,
    /// Head buffers of sent frames, for reuse.
    heads: Vec<Vec<u8>>,
    /// The features that are agreed with the peer.
    features: Features,
}

#[derive(Debug)]
struct QueuedFrame<B> {
    head: Vec<u8>,
    body: B,
    /// The length of head and body. 0 for a stream that is not encoded yet.
    bytes: usize,
    is_stream: bool,
    /// Descriptors that the first byte of the frame carries.
    descriptors: Vec<OwnedFd>,
}

impl<B: SendBody> SendQueue<B> {
    /// Sets the features that are agreed with the peer, for the frames that are queued from now
    /// on. None are agreed before.
    pub fn agree(&mut self, features: Features) {
        self.features = features;
    }

    /// Returns the features that are agreed with the peer.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Queues a frame. `crc` is the checksum of its body, if it has one.
    pub fn push(&mut self, envelope: &Envelope, message: &Message, crc: Option<u32>, body: B) {
        let mut head = self.head();
        let stamp = BodyStamp { bytes: body.bytes(), crc };
        encode_for(self.features, &mut head, envelope, message, stamp);
        let bytes = head.len() + stamp.bytes as usize;
        let descriptors = Vec::new();
        self.queue.push_back(QueuedFrame { head, body, bytes, is_stream: false, descriptors });
    }

    /// Queues a frame whose first byte carries descriptors. If the system passes no descriptors,
    /// the frame is sent without them.
    pub fn push_with_descriptors(
        &mut self,
        envelope: &Envelope,
        message: &Message,
        body: B,
        descriptors: Vec<OwnedFd>,
    ) {
        self.push(envelope, message, None, body);
        if let Some(frame) = self.queue.back_mut() {
            frame.descriptors = descriptors;
        }
    }

    /// Queues a stream, whose frames are those of [`SendBody::next_frame`].
    pub fn push_stream(&mut self, body: B) {
        let head = self.head();
        let descriptors = Vec::new();
        self.queue.push_back(QueuedFrame { head, body, bytes: 0, is_stream: true, descriptors });
    }

    fn head(&mut self) -> Vec<u8> {
        self.heads.pop().unwrap_or_else(|| Vec::with_capacity(HEAD_BYTES))
    }

    /// Returns the number of queued items.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns whether everything is sent.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns whether the last write blocked.
    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Returns the item that is being sent.
    pub fn front(&self) -> Option<&B> {
        self.queue.front().map(|frame| &frame.body)
    }

    /// Writes as much as the socket takes, and passes the body of each sent item to `sent`. Returns
    /// whether the socket took bytes.
    ///
    /// # Errors
    /// Those of the write.
    pub fn flush(&mut self, stream: &Stream, mut sent: impl FnMut(B)) -> io::Result<bool> {
        let mut wrote = false;
        self.consume_sent(0, &mut sent);
        while let Some(front) = self.queue.front() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = self.unsent(&mut slices);
            let passes = self.sent == 0 && !front.descriptors.is_empty();
            let written = match passes {
                true => stream.try_send(&slices[..count], &front.descriptors),
                false => stream.try_write(&slices[..count]),
            };
            match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    wrote = true;
                    self.blocked = false;
                    self.consume_sent(count, &mut sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The system passes no descriptors: the peer continues without shared memory.
                Err(_) if passes => self.queue[0].descriptors.clear(),
                Err(error) => return Err(error),
            }
        }
        Ok(wrote)
    }

    /// Fills `slices` with the next unsent bytes, in order. Returns the number of slices filled.
    fn unsent<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let Some(first) = self.queue.front() else { return 0 };
        let mut skip = self.sent;
        let mut count = 0;
        // Later frames join the first one, except behind a stream, whose next frame is not encoded
        // yet. Descriptors are sent with the first byte of a write.
        let others = if first.is_stream { 0 } else { self.queue.len() - 1 };
        let joins = |frame: &&QueuedFrame<B>| !frame.is_stream && frame.descriptors.is_empty();
        let others = self.queue.iter().skip(1).take(others).take_while(joins);
        let all = std::iter::once(first)
            .chain(others)
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

    /// Removes this many sent bytes from the queue, and encodes the next frame of a stream that is
    /// first.
    fn consume_sent(&mut self, bytes: usize, mut done: impl FnMut(B)) {
        self.sent += bytes;
        while let Some(first) = self.queue.front_mut()
            && self.sent >= first.bytes
        {
            self.sent -= first.bytes;
            first.head.clear();
            if first.is_stream && first.body.next_frame(self.features, &mut first.head) {
                first.bytes = first.head.len() + first.body.bytes() as usize;
                continue;
            }
            let Some(QueuedFrame { head, body, .. }) = self.queue.pop_front() else { return };
            // A connection keeps no memory of a burst, nor of one long meta.
            if self.heads.len() < HEADS_MAX && head.capacity() <= HEAD_BYTES {
                self.heads.push(head);
            }
            done(body);
        }
    }
}

impl<B> Default for SendQueue<B> {
    fn default() -> SendQueue<B> {
        SendQueue {
            queue: VecDeque::new(),
            sent: 0,
            blocked: false,
            heads: Vec::new(),
            features: Features::NONE,
        }
    }
}

/// The most slices in one vectored write: parts of one large frame, or several small frames.
const SLICES_MAX: usize = 64;

/// The head buffers that are kept for reuse: usually as many as a connection has in flight.
const HEADS_MAX: usize = 8;

/// The initial capacity of a head buffer. The heads of all frequent frames fit.
const HEAD_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use pushpull_common::protocol::encode;
    use pushpull_common::protocol::message::Heartbeat;

    use super::*;

    /// The slices of a body, and the bodies of the frames of a stream.
    #[derive(Clone, Debug, Default)]
    struct TestBody {
        slices: Vec<Vec<u8>>,
        rest: Vec<Vec<Vec<u8>>>,
    }

    impl SendBody for TestBody {
        fn bytes(&self) -> u64 {
            self.slices.iter().map(|slice| slice.len() as u64).sum()
        }

        fn slices(&self) -> impl Iterator<Item = &[u8]> {
            self.slices.iter().map(Vec::as_slice)
        }

        fn next_frame(&mut self, _features: Features, head: &mut Vec<u8>) -> bool {
            let Some(slices) = self.rest.pop() else { return false };
            self.slices = slices;
            let stamp = BodyStamp::plain(self.bytes());
            encode(head, &Envelope::default(), &Heartbeat {}.into(), stamp);
            true
        }
    }

    fn body(index: usize) -> Vec<Vec<u8>> {
        let chunk = |length: usize| vec![index as u8; length];
        match index % 3 {
            0 => Vec::new(),
            1 => vec![chunk(5 * index)],
            // A frame may have more slices than one write takes.
            _ => (0..100 + index).map(|_| chunk(1 + index % 4)).collect(),
        }
    }

    /// Queues frames and streams. Returns the bytes to be sent and the number of items.
    fn fill(queue: &mut SendQueue<TestBody>) -> (Vec<u8>, usize) {
        let mut expected = Vec::new();
        for index in 0..40 {
            let envelope = Envelope::default();
            let message = Heartbeat {}.into();
            let slices = body(index);
            let whole = slices.concat();
            if index % 5 == 4 {
                let rest = vec![slices.clone(), slices];
                for body in &rest {
                    let stamp = BodyStamp::plain(body.concat().len() as u64);
                    encode(&mut expected, &envelope, &message, stamp);
                    expected.extend(body.concat());
                }
                queue.push_stream(TestBody { slices: Vec::new(), rest });
                continue;
            }
            let crc = (index % 2 == 0 && !whole.is_empty()).then(|| crc32c::crc32c(&whole));
            queue.push(&envelope, &message, crc, TestBody { slices, rest: Vec::new() });
            let last = queue.queue.back().unwrap();
            expected.extend_from_slice(&last.head);
            expected.extend_from_slice(&whole);
            assert_eq!(last.bytes, last.head.len() + whole.len());
        }
        (expected, queue.len())
    }

    #[test]
    fn partial_writes_send_whole_frames_in_order() {
        for most in [1, 7, 80, 81, 333, 1 << 20] {
            let mut queue = SendQueue::default();
            let mut sent = Vec::new();
            let mut done = 0;
            let (expected, items) = fill(&mut queue);
            while !queue.is_empty() {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let count = queue.unsent(&mut slices);
                assert!(slices[..count].iter().all(|slice| !slice.is_empty()));
                let bytes: Vec<u8> = slices[..count]
                    .iter()
                    .flat_map(|slice| slice.iter())
                    .copied()
                    .take(most)
                    .collect();
                assert!(!bytes.is_empty(), "no bytes to write");
                queue.consume_sent(bytes.len(), |_| done += 1);
                sent.extend(bytes);
            }
            assert!(sent == expected && queue.sent == 0, "{most} bytes per write");
            assert_eq!(done, items);
        }
    }

    #[test]
    fn small_frames_share_a_write_and_their_heads_are_reused() {
        let mut queue = SendQueue::default();
        for _ in 0..10 {
            queue.push(&Envelope::default(), &Heartbeat {}.into(), None, TestBody::default());
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        assert_eq!(queue.unsent(&mut slices), 10);
        let first = queue.queue[0].head.as_ptr();
        queue.consume_sent(queue.queue[0].bytes, drop);
        queue.push(&Envelope::default(), &Heartbeat {}.into(), None, TestBody::default());
        assert_eq!(queue.queue.back().unwrap().head.as_ptr(), first);
    }
}
