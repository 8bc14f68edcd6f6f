//! The connections of a shard. The task of a connection reads requests and writes answers. Its
//! outbox queues the answers, and records what delays or ends the connection.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{
    Envelope, Features, FrameEvent, FrameReader, FrameSink, Message, message,
};
use pushpull_net::auth::ProvenPeer;
use pushpull_net::{
    ArrivedPeer, ConnectionPhase, ConnectionSide, FrameStream, SendBody, SendQueue, Stream,
};
use tokio::sync::Notify;

use super::shard_thread::ShardCore;
use crate::shard::ShardInput;
use crate::shard::output::{AnswerBody, EncodeBuffers, PulledParts};

/// A connection with this many queued frames, or this many bytes of bodies, is not read from.
/// Pulled rows are queued as a copy.
const QUEUE_MAX: usize = 64;
const BODIES_MAX: usize = 4 << 20;

/// Serves a peer that has said hello until either side closes the connection.
pub(super) async fn serve(core: Rc<ShardCore>, arrived: ArrivedPeer) {
    let stream = match Stream::attach(arrived.stream) {
        Ok(stream) => stream,
        Err(error) => return core.descriptor_watch().check(&error),
    };
    let principal = arrived.proven.as_ref().map(|proven| proven.principal.clone());
    let (connection, outbox) = core.register(arrived.proven);
    let mut reader = arrived.reader;
    reader.set_features(core.features());
    outbox.agree(reader.features());
    let registration = ConnectionRegistration { core: core.clone(), connection };
    let hello = &arrived.hello;
    let connected = ShardInput::Connected {
        connection,
        hello,
        header: &arrived.header,
        origin: arrived.origin,
        principal: principal.as_ref(),
    };
    core.handle(connected);
    #[cfg(test)]
    tests::panic_if_asked(hello);
    let mut frames = FrameStream::new(stream, reader);
    frames.open();
    let mut side = ServerSide { core: &core, connection, outbox, bytes: 0 };
    match frames.serve(&mut side, drop).await {
        // The peer closed the socket or its machine is gone: no fault of the connection.
        Ok(()) => {}
        Err(ReadError::Io(error)) => core.descriptor_watch().check(&error),
        Err(_) => core.fault(),
    }
    drop((frames, registration));
}

/// The registration of a connection with the shard. Dropping it frees the connection's slot, even
/// if the task panics.
struct ConnectionRegistration {
    core: Rc<ShardCore>,
    connection: u64,
}

impl Drop for ConnectionRegistration {
    fn drop(&mut self) {
        let forget = || self.core.forget(self.connection);
        if !std::thread::panicking() {
            return forget();
        }
        self.core.fault();
        // A second panic during unwinding would abort the process.
        let _ = catch_unwind(AssertUnwindSafe(forget));
    }
}

/// The server's side of a connection.
struct ServerSide<'a> {
    core: &'a ShardCore,
    connection: u64,
    outbox: Rc<Outbox>,
    /// The bytes received before the last batch of reads ended.
    bytes: u64,
}

impl FrameSink for ServerSide<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        self.core.handle(ShardInput::of_frame(self.connection, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.core.with_body(self.connection, receive)
    }
}

impl ConnectionSide for ServerSide<'_> {
    fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        self.outbox.flush(stream, |answer| self.core.answered(answer))
    }

    fn phase(&self) -> ConnectionPhase {
        self.outbox.phase()
    }

    fn changed(&self) -> &Notify {
        &self.outbox.notify
    }

    fn batch_received(&mut self, reader: &FrameReader) {
        // A partly received frame must make progress; between frames the peer may be idle.
        let progress = std::mem::replace(&mut self.bytes, reader.bytes()) != reader.bytes();
        match (reader.has_begun(), self.outbox.partial_since.get()) {
            (false, _) => self.outbox.partial_since.set(None),
            (true, Some(_)) if !progress => {}
            (true, _) => self.outbox.partial_since.set(Some(Instant::now())),
        }
    }

    fn wait_begins(&mut self, rest: bool) {
        self.core.polling().wait_begins(rest);
    }

    fn socket_ready(&mut self) {
        self.core.polling().socket_ready();
    }
}

/// The body of a queued frame.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation for each pull")]
enum QueuedBody {
    Answer(AnswerBody),
    /// The stream that answers a pull, and the range of its current part.
    Parts(PulledParts, Range<u64>),
}

/// What is left of a sent answer: its memory, for reuse. Its pins are released.
#[derive(Debug)]
pub(super) enum SentAnswer {
    Values(EncodeBuffers),
    Rows(Vec<u8>),
}

impl SendBody for QueuedBody {
    fn bytes(&self) -> u64 {
        self.slices().map(|slice| slice.len() as u64).sum()
    }

    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let (answer, parts) = match self {
            QueuedBody::Answer(body) => (Some(&body[..]), None),
            QueuedBody::Parts(parts, range) => (None, Some(parts.slices(range.clone()))),
        };
        answer.into_iter().chain(parts.into_iter().flatten())
    }

    fn next_frame(&mut self, features: Features, head: &mut Vec<u8>) -> bool {
        let QueuedBody::Parts(parts, range) = self else { return false };
        let next = parts.next_part(features, head);
        next.map(|part| *range = part).is_some()
    }
}

/// The sending side of a connection. Owned by the shard's thread.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: RefCell<SendQueue<QueuedBody>>,
    /// Bytes of the bodies that the queue itself holds; pinned blocks do not count.
    bodies: Cell<usize>,
    /// The queue is to be sent now.
    due: Cell<bool>,
    /// Wakes the connection's task to send or to close.
    notify: Notify,
    /// Close once everything is sent.
    closing: Cell<bool>,
    /// Close at once.
    broken: Cell<bool>,
    /// Since when the peer has read nothing of the queued frames.
    stuck_since: Cell<Option<Instant>>,
    /// Since when the pull at the front has been in progress; it holds its pins until it is sent.
    pull_since: Cell<Option<Instant>>,
    /// Since when a partly received frame has made no progress.
    partial_since: Cell<Option<Instant>>,
    /// Who the peer has proved to be.
    proven: Option<ProvenPeer>,
}

impl Outbox {
    /// Sets the features that are agreed with the peer.
    fn agree(&self, features: Features) {
        self.queue.borrow_mut().agree(features);
    }

    /// Tells the peer that the server has stopped for good, if the peer understands that.
    pub(super) fn say_goodbye(&self) {
        if self.queue.borrow().features().contains(Features::GOODBYE) {
            let goodbye = message::Goodbye {}.into();
            self.put(&Envelope::default(), &goodbye, None, AnswerBody::EMPTY);
            self.send_all();
        }
    }

    /// Queues a frame that is sent with the next one, or once the queue is due.
    pub(super) fn put(
        &self,
        envelope: &Envelope,
        message: &Message,
        crc: Option<u32>,
        body: AnswerBody,
    ) {
        self.bodies.set(self.bodies.get() + body.len());
        self.queue.borrow_mut().push(envelope, message, crc, QueuedBody::Answer(body));
    }

    /// Queues a frame without a body, whose first byte carries descriptors.
    pub(super) fn put_shared(
        &self,
        envelope: &Envelope,
        message: &Message,
        descriptors: Vec<OwnedFd>,
    ) {
        let body = QueuedBody::Answer(AnswerBody::EMPTY);
        self.queue.borrow_mut().push_with_descriptors(envelope, message, body, descriptors);
    }

    /// Queues the answer to a pull, which is encoded part by part.
    pub(super) fn put_parts(&self, parts: PulledParts) {
        self.queue.borrow_mut().push_stream(QueuedBody::Parts(parts, 0..0));
    }

    /// Marks the whole queue as due.
    pub(super) fn send_all(&self) {
        self.due.set(true);
        self.notify.notify_one();
    }

    pub(super) fn close(&self) {
        self.closing.set(true);
        self.send_all();
    }

    pub(super) fn break_off(&self) {
        self.broken.set(true);
        self.notify.notify_one();
    }

    /// Whether nothing is to be sent now.
    fn is_idle(&self) -> bool {
        !self.due.get() || self.queue.borrow().is_empty()
    }

    /// Whether the queue has reached a limit, so that no more requests are read.
    pub(super) fn is_full(&self) -> bool {
        self.queue.borrow().len() >= QUEUE_MAX || self.bodies.get() >= BODIES_MAX
    }

    /// Returns what the connection does next.
    fn phase(&self) -> ConnectionPhase {
        let closing = self.closing.get();
        match self.broken.get() || (closing && self.is_idle()) {
            true => ConnectionPhase::Ended,
            false if closing || self.is_full() => ConnectionPhase::WriteOnly,
            false => ConnectionPhase::Open,
        }
    }

    /// Sends as much as the socket takes, and passes the memory of each sent answer to `answered`.
    /// Returns whether frames are left that are due.
    fn flush(&self, stream: &Stream, mut answered: impl FnMut(SentAnswer)) -> io::Result<bool> {
        if !self.due.get() || self.broken.get() {
            return Ok(false);
        }
        let mut queue = self.queue.borrow_mut();
        let wrote = queue.flush(stream, |body| match body {
            QueuedBody::Answer(body) => {
                self.bodies.set(self.bodies.get() - body.len());
                if let AnswerBody::Rows(rows) = body {
                    answered(SentAnswer::Rows(rows));
                }
            }
            QueuedBody::Parts(parts, _) => {
                self.pull_since.set(None);
                answered(SentAnswer::Values(parts.into_buffers()));
            }
        })?;
        let since = |since: Option<Instant>| since.or_else(|| Some(Instant::now()));
        let stuck = self.stuck_since.get().filter(|_| !wrote);
        self.stuck_since.set(if queue.is_empty() { None } else { since(stuck) });
        self.pull_since.set(match queue.front() {
            Some(QueuedBody::Parts(..)) => since(self.pull_since.get()),
            _ => None,
        });
        self.due.set(!queue.is_empty());
        Ok(!queue.is_empty())
    }
}

/// The outboxes of a shard's connections, by number. Numbers are never repeated.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    outboxes: RefCell<HashMap<u64, Rc<Outbox>>>,
    last_number: Cell<u64>,
    /// Outboxes with a corked frame.
    corked: RefCell<Vec<Rc<Outbox>>>,
    removed: Notify,
}

impl Outboxes {
    /// Adds the outbox of a new connection, of a peer that has proved to be this one. Returns it and the connection's number.
    pub(super) fn add(&self, proven: Option<ProvenPeer>) -> (u64, Rc<Outbox>) {
        let connection = self.last_number.get() + 1;
        self.last_number.set(connection);
        let outbox = Rc::new(Outbox { proven, ..Outbox::default() });
        self.outboxes.borrow_mut().insert(connection, outbox.clone());
        (connection, outbox)
    }

    /// Returns the outbox of a connection.
    pub(super) fn of(&self, connection: u64) -> Option<Rc<Outbox>> {
        self.outboxes.borrow().get(&connection).cloned()
    }

    /// Returns the outboxes whose peers the credentials let in no more, each with its peer's name.
    pub(super) fn revoked(&self) -> Vec<(String, Rc<Outbox>)> {
        let outboxes = self.outboxes.borrow();
        let revoked = outboxes.values().filter_map(|outbox| {
            let proven = outbox.proven.as_ref().filter(|proven| !proven.is_admitted())?;
            Some((proven.principal.name.clone(), outbox.clone()))
        });
        revoked.collect()
    }

    /// Returns all outboxes.
    pub(super) fn all(&self) -> Vec<Rc<Outbox>> {
        self.outboxes.borrow().values().cloned().collect()
    }

    /// Removes the outbox of a connection that has ended.
    pub(super) fn remove(&self, connection: u64) {
        if let Some(outbox) = self.outboxes.borrow_mut().remove(&connection) {
            self.corked.borrow_mut().retain(|other| !Rc::ptr_eq(other, &outbox));
        }
        self.removed.notify_one();
    }

    /// Delays the last frame of an outbox until [`Outboxes::send_corked`], or until its next frame.
    pub(super) fn cork(&self, outbox: Rc<Outbox>) {
        self.corked.borrow_mut().push(outbox);
    }

    /// Sends the corked frames.
    pub(super) fn send_corked(&self) {
        self.corked.borrow_mut().drain(..).for_each(|outbox| outbox.send_all());
    }

    /// Returns the outbox whose pull has been in progress for longest.
    pub(super) fn slowest_pull(&self) -> Option<Rc<Outbox>> {
        let outboxes = self.outboxes.borrow();
        let pulls = outboxes.values().filter(|outbox| outbox.pull_since.get().is_some());
        pulls.min_by_key(|outbox| outbox.pull_since.get()).cloned()
    }

    /// Yields the outboxes whose connections have made no progress for `limit`.
    pub(super) fn stalled(&self, now: Instant, limit: Duration) -> Vec<Rc<Outbox>> {
        let is_stalled = |outbox: &&Rc<Outbox>| {
            let since = [outbox.stuck_since.get(), outbox.partial_since.get()];
            let mut since = since.into_iter().flatten();
            let stalled = since.any(|since| now.saturating_duration_since(since) >= limit);
            stalled && !outbox.broken.get()
        };
        self.outboxes.borrow().values().filter(is_stalled).cloned().collect()
    }

    /// Closes every connection once its frames are sent, and waits for the ends.
    pub(super) async fn close(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.close());
        while !self.outboxes.borrow().is_empty() {
            self.removed.notified().await;
        }
    }

    /// Closes every connection at once.
    pub(super) fn break_off(&self) {
        self.outboxes.borrow().values().for_each(|outbox| outbox.break_off());
    }
}

#[cfg(test)]
mod tests;
