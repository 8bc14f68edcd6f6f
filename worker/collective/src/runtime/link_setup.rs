//! Opens the two links of a rank in a ring that has formed.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{Hello, RingLink, RingLinked};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, encode};
use pushpull_net::auth::{Credentials, ProofError, say_hello};
use pushpull_net::{Connector, FrameStream, PipeReader, PipeWriter, Stream};

use super::door::{DoorState, IncomingLink};
use crate::formed_ring::{FormedRing, RankPlace};
use crate::links::{LinkIn, LinkOut, Links};
use crate::transport::Transport;

/// The bytes of a link that are on their way in shared memory: two parts.
const PIPE_BYTES: u64 = 2 << 20;

/// The pauses before a connection that was closed without an answer is tried again.
const RETRY_PAUSES: [Duration; 4] = [
    Duration::from_millis(10),
    Duration::from_millis(40),
    Duration::from_millis(160),
    Duration::from_millis(640),
];

/// The links of a rank and the kinds of their connections.
#[derive(Debug)]
pub(crate) struct OpenLinks {
    /// The links.
    pub(crate) links: Links,
    /// The kind of the connection from the predecessor.
    pub(crate) from: Transport,
    /// The kind of the connection to the successor.
    pub(crate) to: Transport,
}

/// Whether the links of a rank use shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryUse {
    /// They do not.
    Never,
    /// They do where both sides can.
    IfPossible,
    /// They must.
    Always,
}

impl MemoryUse {
    /// Returns what a rank does whose links are restricted to this transport.
    pub(super) fn of(transport: Option<Transport>) -> MemoryUse {
        match transport {
            None => MemoryUse::IfPossible,
            Some(Transport::SharedMemory) => MemoryUse::Always,
            Some(Transport::Tcp | Transport::Unix) => MemoryUse::Never,
        }
    }

    /// Goes on without memory, unless it must be used.
    fn without(self, cause: &str) -> Result<(), String> {
        match self {
            MemoryUse::Always => Err(format!("no memory is shared: {cause}")),
            MemoryUse::Never | MemoryUse::IfPossible => Ok(()),
        }
    }
}

/// What a rank opens its link to the successor with.
pub(super) struct OwnLink {
    pub(super) hello: Hello,
    pub(super) memory: MemoryUse,
    pub(super) credentials: Option<Credentials>,
}

/// The link from the predecessor, and the reader of its frames.
type AcceptedLink = (LinkIn, FrameReader, Transport);

/// The link to the successor, and whether it leaves this host.
type OpenedLink = (LinkOut, Transport, bool);

/// Opens the links of this rank. Returns the fault and whose it is.
pub(super) async fn open(
    ring: &FormedRing,
    own: &OwnLink,
    door: &Rc<DoorState>,
    within: Duration,
) -> Result<OpenLinks, String> {
    let predecessor = ring.predecessor();
    let theirs = ring.awaited_link();
    let successor = connect(ring, own, ring.own_link());
    let accepted = async {
        let accepted = accept(door.link(&theirs).await, own.memory).await;
        accepted.map_err(|cause| format!("rank {predecessor}: {cause}"))
    };
    let both = async { tokio::try_join!(successor, accepted) };
    let ((out, to, is_remote), (link, reader, from)) =
        tokio::time::timeout(within, both)
            .await
            .map_err(|_| format!("its links have not opened within {within:?}"))??;
    // Checksums of bodies are for networks: a sender adds them by where its successor is.
    Ok(OpenLinks { links: Links::new(link, reader, out, is_remote), from, to })
}

/// Accepts the link of the predecessor, and offers memory to one on this host.
async fn accept(incoming: IncomingLink, memory: MemoryUse) -> Result<AcceptedLink, String> {
    let IncomingLink { stream, reader, origin } = incoming;
    let cause = |error: io::Error| error.to_string();
    let mut frames = FrameStream::new(Stream::attach(stream).map_err(cause)?, reader);
    let mut transport = match origin {
        PeerOrigin::Unix { .. } => Transport::Unix,
        PeerOrigin::Remote | PeerOrigin::Loopback => Transport::Tcp,
    };
    let created = match transport {
        _ if memory == MemoryUse::Never => None,
        Transport::Unix => match PipeReader::create(PIPE_BYTES) {
            Ok(created) => Some(created),
            Err(error) => memory.without(&error.to_string()).map(|()| None)?,
        },
        _ => memory.without("the link is TCP").map(|()| None)?,
    };
    let Some((pipe, descriptor)) = created else {
        frames.send(&linked(0)).await.map_err(cause)?;
        return accepted(frames, None, transport);
    };
    frames.send_passing(&linked(PIPE_BYTES), &[descriptor]).await.map_err(cause)?;
    let pipe = match frames.next().await {
        Ok((_, Message::RingLinked(RingLinked { memory: PIPE_BYTES }))) => {
            transport = Transport::SharedMemory;
            Some(pipe)
        }
        Ok((_, Message::RingLinked(RingLinked { memory: 0 }))) => {
            memory.without("it uses none").map(|()| None)?
        }
        Ok((_, other)) => return Err(format!("it answers with a {}", other.name())),
        Err(error) => return Err(Chain(&error).to_string()),
    };
    accepted(frames, pipe, transport)
}

fn accepted(
    frames: FrameStream,
    pipe: Option<PipeReader>,
    transport: Transport,
) -> Result<AcceptedLink, String> {
    let (stream, reader) = frames.into_parts();
    let link = stream.detach().and_then(|stream| LinkIn::new(stream, pipe));
    Ok((link.map_err(|error| error.to_string())?, reader, transport))
}

/// Connects to the successor, under the first of its addresses that answers.
async fn connect(ring: &FormedRing, own: &OwnLink, link: RingLink) -> Result<OpenedLink, String> {
    let successor = ring.successor();
    let (Some(place), Some(here)) = (ring.place(successor), ring.place(ring.rank)) else {
        return Err(format!("rank {successor} has no place"));
    };
    let mut faults = Vec::new();
    for address in reachable(place, here) {
        match open_link_patiently(address, own, &link).await {
            Ok(opened) => return Ok(opened),
            Err(fault) => faults.push(format!("{address}: {}", fault.cause)),
        }
    }
    if faults.is_empty() {
        faults.push(format!("rank {} can use none of its addresses", ring.rank));
    }
    Err(format!("cannot connect to rank {successor} on {}: {}", place.host, faults.join("; ")))
}

/// Returns the addresses of a rank that another one tries: its Unix socket only on the same host.
fn reachable<'a>(place: &'a RankPlace, from: &RankPlace) -> Vec<&'a str> {
    let network = |place: &RankPlace| {
        let address = place.addresses.iter().find(|address| !address.starts_with("unix:"));
        address.and_then(|address| address.rsplit_once(':').map(|(host, _)| host.to_owned()))
    };
    // One network address belongs to one host. Ranks without one meet in a folder of their host.
    let is_near = network(place) == network(from);
    let addresses = place.addresses.iter().map(String::as_str);
    addresses.filter(|address| is_near || !address.starts_with("unix:")).collect()
}

/// The reason why a link was not opened.
struct OpenFault {
    cause: String,
    /// Whether the successor had accepted the connection and closed it without an answer.
    is_closed: bool,
}

/// Opens a link. A successor at whose port strangers crowd may close a connection to make room: then
/// it is tried again.
async fn open_link_patiently(
    address: &str,
    own: &OwnLink,
    link: &RingLink,
) -> Result<OpenedLink, OpenFault> {
    for pause in RETRY_PAUSES {
        match open_link(address, own, link).await {
            Err(fault) if fault.is_closed => tokio::time::sleep(pause).await,
            opened => return opened,
        }
    }
    open_link(address, own, link).await
}

async fn open_link(address: &str, own: &OwnLink, link: &RingLink) -> Result<OpenedLink, OpenFault> {
    let failed = |cause: String| OpenFault { cause, is_closed: false };
    let closed = |error: io::Error| OpenFault { cause: error.to_string(), is_closed: true };
    let OwnLink { hello, memory, credentials } = own;
    let memory = *memory;
    let connector = Connector::new(address).credentials(credentials.clone());
    let connected = connector.connect(Connector::LIMIT).await;
    let stream = connected.map_err(|error| failed(Chain(&error).to_string()))?.stream;
    let mut frames = FrameStream::new(stream, FrameReader::new());
    let mut bytes = Vec::new();
    match say_hello(&mut frames, credentials.as_ref(), Envelope::default(), hello.clone()).await {
        Ok(()) => {}
        Err(ProofError::Send(error) | ProofError::Read(ReadError::Io(error))) => {
            return Err(closed(error));
        }
        Err(error) => return Err(failed(Chain(&error).to_string())),
    }
    encode(&mut bytes, &Envelope::default(), &link.clone().into(), BodyStamp::NONE);
    frames.send(&bytes).await.map_err(closed)?;
    let mut descriptor = None;
    let offered = match frames.next_taking(|passed| descriptor = Some(passed)).await {
        Ok((_, Message::RingLinked(linked))) => linked.memory,
        Ok((_, Message::Refused(refused))) => return Err(failed(refused.refusal.to_string())),
        Ok((_, other)) => return Err(failed(format!("it answers with a {}", other.name()))),
        Err(ReadError::Io(error)) => return Err(closed(error)),
        Err(error) => return Err(failed(Chain(&error).to_string())),
    };
    let pipe = match (offered, descriptor) {
        _ if memory == MemoryUse::Never => Ok(None),
        (0, _) | (_, None) => memory.without("it offers none").map(|()| None),
        (bytes, Some(descriptor)) => match PipeWriter::open(descriptor, bytes) {
            Ok(pipe) => Ok(Some(pipe)),
            Err(error) => memory.without(&error.to_string()).map(|()| None),
        },
    };
    let pipe = pipe.map_err(failed)?;
    if offered > 0 {
        let taken = if pipe.is_some() { offered } else { 0 };
        frames.send(&linked(taken)).await.map_err(closed)?;
    }
    let stream = frames.into_parts().0.detach().map_err(|error| failed(error.to_string()))?;
    let is_remote = !stream.is_loopback();
    let transport = match (stream.is_unix(), &pipe) {
        (false, _) => Transport::Tcp,
        (true, Some(_)) => Transport::SharedMemory,
        (true, None) => Transport::Unix,
    };
    let link = LinkOut::new(stream, pipe).map_err(|error| failed(error.to_string()))?;
    Ok((link, transport, is_remote))
}

/// Encodes the answer to a link, with the bytes of memory that carry it.
fn linked(memory: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let message = RingLinked { memory };
    encode(&mut bytes, &Envelope::default(), &message.into(), BodyStamp::NONE);
    bytes
}
