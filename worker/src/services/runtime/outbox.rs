//! The sending side of one connection.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pushpull_common::protocol::message::Goodbye;
use pushpull_common::protocol::{Envelope, Features, Message};
use pushpull_net::{ConnectionPhase, SendQueue, Stream};
use tokio::sync::Notify;

use crate::services::value_body::ValueBody;

/// The most frames that wait for a slow peer before its requests are not read any more.
const FRAMES_MAX: usize = 4096;

/// The frames that a connection is to send, shared between its task and those who send.
#[derive(Debug, Default)]
pub(super) struct CallOutbox {
    frames: Mutex<SendQueue<ValueBody>>,
    notify: Notify,
    /// Whether the connection ends once everything is sent.
    closing: AtomicBool,
    /// Whether the connection ends at once.
    given_up: AtomicBool,
}

impl CallOutbox {
    /// Sets the features that are agreed with the peer.
    pub(super) fn agree(&self, features: Features) {
        self.frames().agree(features);
    }

    /// Tells the peer that this side stops, if it understands that.
    pub(super) fn say_goodbye(&self) {
        let features = self.frames().features();
        if features.contains(Features::GOODBYE) {
            self.push(&Envelope::default(), &Goodbye {}.into(), ValueBody::default(), false);
        }
    }

    pub(super) fn push(&self, envelope: &Envelope, message: &Message, body: ValueBody, crc: bool) {
        let crc = crc.then(|| body.crc());
        self.frames().push(envelope, message, crc, body);
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

    /// Writes as much as the socket takes. Returns whether frames are left.
    pub(super) fn flush(&self, stream: &Stream) -> io::Result<bool> {
        let mut frames = self.frames();
        frames.flush(stream, drop)?;
        Ok(!frames.is_empty())
    }

    pub(super) fn phase(&self) -> ConnectionPhase {
        let unsent = self.frames().len();
        match self.closing.load(Ordering::Relaxed) {
            _ if self.is_given_up() => ConnectionPhase::Ended,
            true if unsent == 0 => ConnectionPhase::Ended,
            true => ConnectionPhase::WriteOnly,
            false if unsent > FRAMES_MAX => ConnectionPhase::WriteOnly,
            false => ConnectionPhase::Open,
        }
    }

    pub(super) fn changed(&self) -> &Notify {
        &self.notify
    }

    fn frames(&self) -> MutexGuard<'_, SendQueue<ValueBody>> {
        // A panic while a frame is queued leaves the queue as it was.
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
