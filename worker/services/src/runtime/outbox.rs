//! The sending side of one connection.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pushpull_common::protocol::message::Goodbye;
use pushpull_common::protocol::{Envelope, Features, Message};
use pushpull_net::auth::QueuedProof;
use pushpull_net::{ConnectionPhase, SendBody, SendQueue, Stream};
use tokio::sync::Notify;

use crate::value_body::ValueBody;

/// A server does not read from a connection with this many unsent frames, or this many unsent bytes
/// of values. The client acknowledges no answers then, so its calls stay charged to it.
const FRAMES_MAX: usize = 4096;
const BODIES_MAX: u64 = 8 << 20;

/// The unsent frames of a connection, shared between its task and the senders.
#[derive(Debug, Default)]
pub(super) struct CallOutbox {
    unsent: Mutex<UnsentFrames>,
    /// What this side proves, if it is a client.
    proof: QueuedProof,
    notify: Notify,
    /// Whether the connection ends once everything is sent.
    closing: AtomicBool,
    /// Whether the connection ends at once.
    given_up: AtomicBool,
}

/// The frames that are not sent.
#[derive(Debug, Default)]
struct UnsentFrames {
    frames: SendQueue<ValueBody>,
    /// The total size of their bodies in bytes.
    bodies: u64,
    /// The time since which the peer has read none of the unsent frames.
    stuck_since: Option<Instant>,
}

/// The result of a write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flushed {
    /// Whether frames are left.
    pub(super) is_left: bool,
    /// Whether the peer reads while this side reads nothing from it.
    pub(super) drains: bool,
}

impl UnsentFrames {
    /// Whether the queue has reached a limit, so that a server reads no more requests.
    fn is_full(&self) -> bool {
        self.frames.len() > FRAMES_MAX || self.bodies > BODIES_MAX
    }
}

impl CallOutbox {
    /// Returns what this side proves.
    pub(super) fn proof(&self) -> &QueuedProof {
        &self.proof
    }

    /// Sets the features that are agreed with the peer.
    pub(super) fn agree(&self, features: Features) {
        self.unsent().frames.agree(features);
    }

    /// Tells the peer that this side stops, if it understands that.
    pub(super) fn say_goodbye(&self) {
        let features = self.unsent().frames.features();
        if features.contains(Features::GOODBYE) {
            self.push(&Envelope::default(), &Goodbye {}.into(), ValueBody::default(), false);
        }
    }

    pub(super) fn push(&self, envelope: &Envelope, message: &Message, body: ValueBody, crc: bool) {
        let replaced = self.proof.replaced(envelope, message);
        let message = replaced.as_ref().unwrap_or(message);
        let crc = crc.then(|| body.crc());
        let mut unsent = self.unsent();
        unsent.bodies += body.bytes();
        unsent.frames.push(envelope, message, crc, body);
        drop(unsent);
        self.notify.notify_one();
    }

    /// Ends the connection once everything is sent.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }

    /// Ends the connection at once. Its end is not reported.
    pub(super) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Writes as much as the socket takes.
    pub(super) fn flush(&self, stream: &Stream) -> io::Result<Flushed> {
        let mut unsent = self.unsent();
        let was_full = unsent.is_full();
        let UnsentFrames { frames, bodies, stuck_since } = &mut *unsent;
        let has_written = frames.flush(stream, |body| *bodies -= body.bytes())?;
        let is_left = !frames.is_empty();
        let since = stuck_since.filter(|_| !has_written);
        *stuck_since = is_left.then(|| since.unwrap_or_else(Instant::now));
        Ok(Flushed { is_left, drains: was_full && has_written })
    }

    /// Returns once the peer has read nothing of the unsent frames for this time.
    pub(super) async fn stalled(&self, limit: Duration) {
        loop {
            let now = Instant::now();
            let since = self.unsent().stuck_since;
            match since.unwrap_or(now).checked_add(limit) {
                Some(until) if since.is_some() && until <= now => return,
                Some(until) => tokio::time::sleep_until(until.into()).await,
                // A limit beyond the range of the clock has no end.
                None => std::future::pending().await,
            }
        }
    }

    pub(super) fn phase(&self) -> ConnectionPhase {
        let unsent = self.unsent();
        match self.closing.load(Ordering::Relaxed) {
            _ if self.is_given_up() || self.proof.has_failed() => ConnectionPhase::Ended,
            true if unsent.frames.is_empty() => ConnectionPhase::Ended,
            true => ConnectionPhase::WriteOnly,
            false if unsent.is_full() => ConnectionPhase::WriteOnly,
            false => ConnectionPhase::Open,
        }
    }

    pub(super) fn changed(&self) -> &Notify {
        &self.notify
    }

    fn unsent(&self) -> MutexGuard<'_, UnsentFrames> {
        // A panic while a frame is queued leaves the queue as it was.
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use pushpull_common::protocol::message::Heartbeat;

    use super::*;
    use crate::value::Value;

    /// Limit on every wait.
    const LONG: Duration = Duration::from_secs(60);

    fn block_on(future: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async { tokio::time::timeout(LONG, future).await.unwrap() });
    }

    /// Queues frames until a server reads no more requests, although the socket takes some.
    fn fill(outbox: &CallOutbox, stream: &Stream) {
        let value = Value::zeros::<f32>(&[1 << 18]).unwrap();
        while outbox.phase() == ConnectionPhase::Open {
            let body = ValueBody::parts([&value]).remove(0);
            outbox.push(&Envelope::default(), &Heartbeat {}.into(), body, false);
            outbox.flush(stream).unwrap();
        }
    }

    #[test]
    fn a_peer_that_does_not_read_is_not_read_from_and_stalls() {
        block_on(async {
            let (own, mut peer) = UnixStream::pair().unwrap();
            let stream = Stream::attach(own.into()).unwrap();
            let outbox = CallOutbox::default();
            fill(&outbox, &stream);
            assert_eq!(outbox.phase(), ConnectionPhase::WriteOnly);
            assert!(outbox.unsent().bodies <= BODIES_MAX + (1 << 20));
            // Nothing is read, so each further write leaves the stall as it is.
            let stuck = outbox.unsent().stuck_since;
            assert!(!outbox.flush(&stream).unwrap().drains);
            assert_eq!(outbox.unsent().stuck_since, stuck);
            outbox.stalled(Duration::from_millis(20)).await;
            // The peer reads.
            let mut buffer = vec![0; 1 << 20];
            let mut drains = 0;
            while outbox.flush(&stream).unwrap().is_left {
                assert!(peer.read(&mut buffer).unwrap() > 0);
                drains += usize::from(outbox.flush(&stream).unwrap().drains);
            }
            assert!(drains > 0);
            let unsent = outbox.unsent();
            assert_eq!((unsent.bodies, unsent.stuck_since), (0, None));
            drop(unsent);
            assert_eq!(outbox.phase(), ConnectionPhase::Open);
        });
    }
}
