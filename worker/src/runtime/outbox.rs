//! What waits to be sent over one connection.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_common::protocol::{BodyStamp, Envelope, Message, encode};
use pushpull_net::Stream;
use tokio::sync::Notify;

use crate::parts::FrameBody;

/// How many stretches one write is given: of a large frame, or of several that are small.
const SLICES_MAX: usize = 64;

/// Descriptors that wait to be taken: more are closed.
const DESCRIPTORS_MAX: usize = 4;

/// Heads that are kept for frames to come: as many as one connection has under way, usually.
const HEADS_MAX: usize = 64;

/// How long a head is made: those of all frames that are sent again and again fit.
const HEAD_BYTES: usize = 256;

/// The sending side of one connection, shared between its task and the session's outputs.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    frames: Mutex<Frames>,
    /// The link takes no more until the peer reads.
    full: AtomicBool,
    notify: Notify,
    /// The session has given the connection up: it ends without a word.
    given_up: AtomicBool,
    /// What has come beside the frames, and not been taken yet.
    descriptors: Mutex<Vec<OwnedFd>>,
}

impl Outbox {
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

    /// Keeps a descriptor that has come for whoever reads the frame that it has come with; nobody asks
    /// for so many that more than a few wait.
    pub(super) fn keep_descriptor(&self, descriptor: OwnedFd) {
        let mut descriptors = lock(&self.descriptors);
        if descriptors.len() < DESCRIPTORS_MAX {
            descriptors.push(descriptor);
        }
    }

    /// The descriptors that have come.
    pub(super) fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *lock(&self.descriptors))
    }

    /// Waits until there is something to send, or the connection is given up.
    pub(super) async fn changed(&self) {
        self.notify.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames().queue.is_empty()
    }

    /// Sends as much as the link takes. Whether it took something after it had been full: then the
    /// peer has read. That a link which is not full takes something says nothing about the peer.
    pub(super) fn flush(&self, stream: &Stream) -> io::Result<bool> {
        let mut frames = self.frames();
        let mut drained = false;
        while !frames.queue.is_empty() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let count = frames.unsent(&mut slices);
            match stream.try_write(&slices[..count]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    frames.taken(count);
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

/// Whoever has panicked in it has ended the session: what lies there is sent to nobody.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A frame to send.
#[derive(Debug)]
struct Frame {
    head: Vec<u8>,
    body: FrameBody,
    /// The length of both.
    bytes: usize,
}

/// Frames in the order in which they are sent.
#[derive(Debug, Default)]
struct Frames {
    queue: VecDeque<Frame>,
    /// How much of the first has been sent.
    sent: usize,
    /// The heads of frames that have been sent, for others.
    heads: Vec<Vec<u8>>,
}

impl Frames {
    fn push(&mut self, envelope: &Envelope, message: &Message, body: FrameBody, crc: bool) {
        let bytes = body.bytes();
        let checksum = || body.slices().fold(0, crc32c::crc32c_append);
        let stamp = BodyStamp { bytes, crc: (crc && bytes > 0).then(checksum) };
        let kept = self.heads.pop();
        let mut head = kept.unwrap_or_else(|| Vec::with_capacity(HEAD_BYTES));
        encode(&mut head, envelope, message, stamp);
        let bytes = head.len() + bytes as usize;
        self.queue.push_back(Frame { head, body, bytes });
    }

    /// Lists what is to be sent next, in order, as far as there is room; how many stretches that are.
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

    /// So many bytes have been sent.
    fn taken(&mut self, bytes: usize) {
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
        let stretch = |length: usize| Bytes::from(vec![index as u8; length]);
        match index % 3 {
            0 => FrameBody::Empty,
            1 => stretch(5 * index).into(),
            // A frame may be of more stretches than one write takes.
            _ => (0..100 + index).map(|_| stretch(1 + index % 4)).collect(),
        }
    }

    #[test]
    fn however_little_is_taken_at_once_frames_are_sent_whole_and_in_order() {
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
                assert!(!bytes.is_empty(), "there is always something to write");
                frames.taken(bytes.len());
                sent.extend(bytes);
            }
            assert!(sent == expected && frames.sent == 0, "{most} at once");
        }
    }

    #[test]
    fn small_frames_go_out_together_and_their_heads_are_used_again() {
        let mut frames = Frames::default();
        for _ in 0..10 {
            frames.push(&Envelope::default(), &Heartbeat {}.into(), FrameBody::Empty, false);
        }
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        assert_eq!(frames.unsent(&mut slices), 10);
        let first = frames.queue[0].head.as_ptr();
        frames.taken(frames.queue[0].bytes);
        frames.push(&Envelope::default(), &Heartbeat {}.into(), FrameBody::Empty, false);
        assert_eq!(frames.queue.back().unwrap().head.as_ptr(), first);
    }
}
