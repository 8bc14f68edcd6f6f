//! [`ShardConnection`]: one connection to a shard, from connecting to closing, with its send queue.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pushpull_common::error::Chain;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::{Envelope, Features, FrameEvent, FrameReader, FrameSink, Message};
use pushpull_net::auth::{ProofStep, QueuedProof};
use pushpull_net::{
    Connected, ConnectionPhase, ConnectionSide, Connector, FrameStream, SendBody, SendQueue, Stream,
};
use tokio::sync::Notify;

use super::thread::SessionCore;
use crate::gradients::parts::FrameBody;
use crate::session::SessionInput;

/// A connection that the session wants to have.
pub(super) struct ConnectOrder {
    pub(super) link: usize,
    pub(super) connector: Arc<Connector>,
    pub(super) outbox: Arc<LinkOutbox>,
    /// The features of this side.
    pub(super) features: Features,
}

/// One connection of a link: a task of the session's runtime.
pub(super) struct ShardConnection {
    core: Arc<SessionCore>,
    link: usize,
    connector: Arc<Connector>,
    outbox: Arc<LinkOutbox>,
    /// The features of this side.
    features: Features,
    /// The address of a server that has sent nothing yet.
    unproven: Option<SocketAddr>,
}

impl ShardConnection {
    pub(super) fn new(core: Arc<SessionCore>, order: ConnectOrder) -> ShardConnection {
        let ConnectOrder { link, connector, outbox, features } = order;
        ShardConnection { core, link, connector, outbox, features, unproven: None }
    }

    /// Connects and exchanges frames until the connection ends. Then reports the end to the
    /// session, unless the session has given the connection up.
    pub(super) async fn run(mut self) {
        let link = self.link;
        let end = match self.connector.connect(Connector::LIMIT).await {
            Err(error) if error.is_misconfigured() => {
                SessionInput::Unresolved { link, error: Chain(&error).to_string() }
            }
            Err(error) => SessionInput::Disconnected { link, error: Chain(&error).to_string() },
            Ok(connected) => {
                let error = match self.converse(connected).await {
                    Ok(()) => "the server has closed the connection".to_owned(),
                    Err(error) => Chain(&error).to_string(),
                };
                match self.outbox.proof.failure() {
                    Some(reason) => SessionInput::Unproven { link, reason },
                    None => SessionInput::Disconnected { link, error },
                }
            }
        };
        self.core.sharing_ended(link, &self.outbox);
        if !self.outbox.is_given_up() {
            self.core.handle(end);
        }
    }

    async fn converse(&mut self, connected: Connected) -> Result<(), ReadError> {
        let Connected { stream, address } = connected;
        self.unproven = address;
        let link = self.link;
        let same_host = stream.passes_descriptors();
        let mut frames = FrameStream::new(stream, FrameReader::new());
        // The configuration names the server, so it is trusted: its metas may have any length.
        frames.open();
        frames.set_features(self.features);
        self.outbox.proof.begin(self.connector.own_credentials(), frames.stream());
        if !self.outbox.is_given_up() {
            self.core.count_connection(link);
            self.core.handle(SessionInput::Connected { link, same_host });
        }
        let outbox = self.outbox.clone();
        frames.serve(self, |descriptor| outbox.keep_descriptor(descriptor)).await
    }
}

impl FrameSink for ShardConnection {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        if let Some(address) = self.unproven.take() {
            self.connector.answered(Some(address));
        }
        if let FrameEvent::Message(_, message) = &event {
            match self.outbox.proof.take(message) {
                ProofStep::Pass => {}
                ProofStep::Answer(envelope, answer) => {
                    let answer = answer.into();
                    return self.outbox.push(&envelope, &answer, FrameBody::default(), false);
                }
                ProofStep::End => return,
            }
            if let Some(peer) = Features::of_peer(message) {
                self.outbox.frames().agree(self.features.agreed(peer));
            }
        }
        self.core.handle(SessionInput::of_frame(self.link, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.core.with_body(self.link, receive)
    }
}

impl ConnectionSide for ShardConnection {
    fn flush(&mut self, stream: &Stream) -> io::Result<bool> {
        let (drained, unsent) = self.outbox.flush(stream)?;
        if drained {
            self.core.handle(SessionInput::BytesSent { link: self.link });
        }
        Ok(unsent)
    }

    fn phase(&self) -> ConnectionPhase {
        match self.outbox.is_given_up() || self.outbox.proof.has_failed() {
            true => ConnectionPhase::Ended,
            false => ConnectionPhase::Open,
        }
    }

    fn changed(&self) -> &Notify {
        &self.outbox.notify
    }
}

impl SendBody for FrameBody {
    fn bytes(&self) -> u64 {
        FrameBody::bytes(self)
    }

    fn slices(&self) -> impl Iterator<Item = &[u8]> {
        FrameBody::slices(self)
    }
}

/// The most received descriptors that are kept until they are taken; others are closed.
const DESCRIPTORS_MAX: usize = 4;

/// The sending side of one connection, shared between its task and the session's outputs.
#[derive(Debug, Default)]
pub(super) struct LinkOutbox {
    frames: Mutex<SendQueue<FrameBody>>,
    notify: Notify,
    /// Whether the session has given the connection up. Its end is not reported then.
    given_up: AtomicBool,
    /// What this side proves.
    proof: QueuedProof,
    /// Received descriptors that have not been taken yet.
    descriptors: Mutex<Vec<OwnedFd>>,
}

impl LinkOutbox {
    fn frames(&self) -> MutexGuard<'_, SendQueue<FrameBody>> {
        lock(&self.frames)
    }

    pub(super) fn push(&self, envelope: &Envelope, message: &Message, body: FrameBody, crc: bool) {
        let replaced = self.proof.replaced(envelope, message);
        let message = replaced.as_ref().unwrap_or(message);
        let checksum = || body.slices().fold(0, crc32c::crc32c_append);
        let crc = (crc && body.bytes() > 0).then(checksum);
        self.frames().push(envelope, message, crc, body);
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

    /// Writes as much as the socket takes. Returns whether it took bytes after a write had blocked,
    /// which shows that the peer has read, and whether frames are left.
    fn flush(&self, stream: &Stream) -> io::Result<(bool, bool)> {
        let mut frames = self.frames();
        let blocked = frames.is_blocked();
        let wrote = frames.flush(stream, drop)?;
        Ok((blocked && wrote, !frames.is_empty()))
    }
}

/// Locks, ignoring poison: a panic under the lock ends the session, and nothing more is sent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
