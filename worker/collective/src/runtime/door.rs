//! [`Door`]: takes the peers that connect to a rank: members for its rendezvous, and its
//! predecessor.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::access::AccessEvent;
use pushpull_common::ids::Incarnation;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::message::{
    Hello, RankAddresses, Refused, RingLink, RingMoved, Role,
};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{FrameReader, Message, Refusal};
use pushpull_net::auth::{AccessReport, ProvenPeer};
use pushpull_net::{ArrivedPeer, ClaimedTask, DetachedStream, FrameStream, PeerReceiver, Stream};
use tokio::sync::Notify;

use super::peer;
use super::server::RendezvousServer;
use crate::waiting_links::WaitingLinks;

/// The time that a peer has to read a refusal.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);

/// A link from another rank that no ring has taken yet.
#[derive(Debug)]
pub(super) struct IncomingLink {
    /// The connection.
    pub(super) stream: DetachedStream,
    /// The reader of its frames.
    pub(super) reader: FrameReader,
    /// Where the peer is.
    pub(super) origin: PeerOrigin,
}

/// What the tasks of a rank share.
#[derive(Debug)]
pub(super) struct DoorState {
    /// This process. Only members of its rings know it, and others open no links.
    process: Incarnation,
    /// The rendezvous, if this process serves it.
    pub(super) server: RefCell<Option<Rc<RendezvousServer>>>,
    /// The addresses of the rank that serves the ring of this process, if another one does.
    pub(super) serving: RefCell<Option<RankAddresses>>,
    links: RefCell<WaitingLinks<IncomingLink>>,
    arrived: Notify,
    access: AccessReport,
}

impl DoorState {
    pub(super) fn new(process: Incarnation, access: AccessReport) -> DoorState {
        DoorState {
            process,
            server: RefCell::default(),
            serving: RefCell::default(),
            links: RefCell::default(),
            arrived: Notify::new(),
            access,
        }
    }

    /// Waits for the link of a rank of a ring.
    pub(super) async fn link(&self, wanted: &RingLink) -> IncomingLink {
        loop {
            let arrived = self.arrived.notified();
            let taken = self.links.borrow_mut().take(wanted);
            if let Some((_, link)) = taken {
                return link;
            }
            arrived.await;
        }
    }

    fn add(&self, link: RingLink, incoming: IncomingLink) {
        self.links.borrow_mut().add(link, incoming);
        self.arrived.notify_waiters();
    }
}

/// Takes the peers that have said hello.
pub(super) struct Door(pub(super) Rc<DoorState>);

impl PeerReceiver for Door {
    /// A rank sends its request together with its hello.
    fn wants_request(&self, hello: &Hello) -> bool {
        hello.role == (Role::Rank {})
    }

    fn claimed_task(&self, hello: &Hello, request: &Message) -> Option<ClaimedTask> {
        claimed_task(hello, request)
    }

    fn access(&self, event: AccessEvent) {
        self.0.access.report(&event);
    }

    async fn take(&self, peer: ArrivedPeer) {
        let ArrivedPeer { stream, reader, hello, request, origin, proven, .. } = peer;
        let Ok(stream) = Stream::attach(stream) else { return };
        let frames = FrameStream::new(stream, reader);
        let Some(request) = request else {
            _ = refuse(frames, Refusal::Role { role: hello.role.code(), kind: 1 }).await;
            return;
        };
        let state = self.0.clone();
        tokio::task::spawn_local(async move {
            _ = serve(&state, frames, hello, origin, request, proven.as_ref()).await;
        });
    }
}

/// Returns the index that a request asks for. A member asks again for each ring.
fn claimed_task(hello: &Hello, request: &Message) -> Option<ClaimedTask> {
    let Message::RingJoin(join) = request else { return None };
    Some(ClaimedTask::of(hello.job.as_str(), join.index))
}

async fn serve(
    state: &Rc<DoorState>,
    frames: FrameStream,
    hello: Hello,
    origin: PeerOrigin,
    request: Message,
    proven: Option<&ProvenPeer>,
) -> std::io::Result<()> {
    match request {
        Message::RingJoin(_) | Message::RingEntered(_) => {
            let server = state.server.borrow().clone();
            let serving = state.serving.borrow().clone();
            match (server, serving) {
                (Some(server), _) => {
                    let revoked = state.access.revoked(proven);
                    let greeting = hello.clone();
                    let fault_of = |message: &Message| {
                        let claimed = claimed_task(&greeting, message)?;
                        claimed.fault(&proven?.principal, greeting.role)
                    };
                    server.serve(frames, hello, request, fault_of, revoked).await;
                }
                (None, Some(addresses)) => return answer(frames, RingMoved { addresses }).await,
                // It will serve as soon as it has noticed that the rendezvous is lost.
                (None, None) => return refuse(frames, Refusal::Stopping {}).await,
            }
        }
        Message::RingLink(link) if link.to != state.process => {
            let kind = Message::from(link).kind();
            let detail = Detail::clipped("the link leads to another process");
            return refuse(frames, Refusal::Unsupported { kind, detail }).await;
        }
        // The link is the ring's, which ends with the connection of its member.
        Message::RingLink(link) => {
            let (stream, reader) = frames.into_parts();
            let stream = stream.detach()?;
            state.add(link, IncomingLink { stream, reader, origin });
        }
        other => {
            let kind = other.kind();
            let detail = Detail::clipped(format!("a rank takes no {}", other.name()));
            return refuse(frames, Refusal::Unsupported { kind, detail }).await;
        }
    }
    Ok(())
}

/// Sends a refusal, and closes the connection.
async fn refuse(frames: FrameStream, refusal: Refusal) -> std::io::Result<()> {
    answer(frames, Refused { refusal }).await
}

/// Sends a message, and closes the connection.
async fn answer(mut frames: FrameStream, message: impl Into<Message>) -> std::io::Result<()> {
    // A peer that does not read it sees the end of the connection.
    let _ = tokio::time::timeout(REFUSAL_TIMEOUT, peer::send(&mut frames, message)).await;
    Ok(())
}
