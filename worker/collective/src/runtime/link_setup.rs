//! Opens the two links of a rank in a ring that has formed.

use std::rc::Rc;
use std::time::Duration;

use pushpull_common::error::Chain;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::decode::ReadError;
use pushpull_common::protocol::message::{Hello, RingLink, RingLinked};
use pushpull_common::protocol::{BodyStamp, Envelope, FrameReader, Message, encode};
use pushpull_net::{Connector, DetachedStream, FrameStream, Stream};

use super::door::{DoorState, IncomingLink};
use super::peer;
use crate::links::Links;
use crate::member::{FormedRing, RankPlace};
use crate::transport::Transport;

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

/// Opens the links of this rank. Returns the fault and whose it is.
pub(super) async fn open(
    ring: &FormedRing,
    hello: Hello,
    door: &Rc<DoorState>,
    within: Duration,
) -> Result<OpenLinks, String> {
    let own = RingLink { rendezvous: ring.rendezvous, epoch: ring.epoch, rank: ring.rank };
    let predecessor = ring.predecessor();
    let theirs = RingLink { rank: predecessor, ..own.clone() };
    let successor = connect(ring, hello, own);
    let accepted = async {
        let IncomingLink { stream, reader, origin } = door.link(&theirs).await;
        let cause = |error: std::io::Error| format!("rank {predecessor}: {error}");
        let mut frames = FrameStream::new(Stream::attach(stream).map_err(cause)?, reader);
        peer::send(&mut frames, RingLinked {}).await?;
        let (stream, reader) = frames.into_parts();
        Ok((stream.detach().map_err(cause)?, reader, origin))
    };
    let both = async { tokio::try_join!(successor, accepted) };
    let ((out, to), (stream, reader, origin)) = tokio::time::timeout(within, both)
        .await
        .map_err(|_| format!("its links have not opened within {within:?}"))??;
    let from = match origin {
        PeerOrigin::Unix { .. } => Transport::Unix,
        PeerOrigin::Remote | PeerOrigin::Loopback => Transport::Tcp,
    };
    // Checksums of bodies are for networks: a sender adds them by where its successor is.
    let has_crc = to == Transport::Tcp && !is_loopback(&out);
    let links = Links::new(stream, reader, out, has_crc);
    let links = links.map_err(|error| format!("cannot set up its sockets: {error}"))?;
    Ok(OpenLinks { links, from, to })
}

/// Connects to the successor, under the first of its addresses that answers.
async fn connect(
    ring: &FormedRing,
    hello: Hello,
    own: RingLink,
) -> Result<(DetachedStream, Transport), String> {
    let successor = ring.successor();
    let (Some(place), Some(here)) = (ring.place(successor), ring.place(ring.rank)) else {
        return Err(format!("rank {successor} has no place"));
    };
    let mut faults = Vec::new();
    for address in reachable(place, here) {
        match open_link_patiently(address, &hello, &own).await {
            Ok(stream) => {
                let transport = match stream {
                    DetachedStream::Tcp(_) => Transport::Tcp,
                    DetachedStream::Unix(_) => Transport::Unix,
                };
                return Ok((stream, transport));
            }
            Err(fault) => faults.push(format!("{address}: {}", fault.cause)),
        }
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

/// Why a link was not opened.
struct OpenFault {
    cause: String,
    /// Whether the successor had accepted the connection and closed it without an answer.
    is_closed: bool,
}

/// Opens a link. A successor at whose port strangers crowd may close a connection to make room: then
/// it is tried again.
async fn open_link_patiently(
    address: &str,
    hello: &Hello,
    own: &RingLink,
) -> Result<DetachedStream, OpenFault> {
    for pause in RETRY_PAUSES {
        match open_link(address, hello, own).await {
            Err(fault) if fault.is_closed => tokio::time::sleep(pause).await,
            opened => return opened,
        }
    }
    open_link(address, hello, own).await
}

async fn open_link(
    address: &str,
    hello: &Hello,
    own: &RingLink,
) -> Result<DetachedStream, OpenFault> {
    let failed = |cause: String| OpenFault { cause, is_closed: false };
    let closed = |error: std::io::Error| OpenFault { cause: error.to_string(), is_closed: true };
    let connector = Connector::new(address);
    let connected = connector.connect(Connector::LIMIT).await;
    let stream = connected.map_err(|error| failed(Chain(&error).to_string()))?.stream;
    let mut frames = FrameStream::new(stream, FrameReader::new());
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &hello.clone().into(), BodyStamp::NONE);
    encode(&mut bytes, &Envelope::default(), &own.clone().into(), BodyStamp::NONE);
    frames.send(&bytes).await.map_err(closed)?;
    match frames.next().await {
        Ok((_, Message::RingLinked(_))) => {}
        Ok((_, Message::Refused(refused))) => return Err(failed(refused.refusal.to_string())),
        Ok((_, other)) => return Err(failed(format!("it answers with a {}", other.name()))),
        Err(ReadError::Io(error)) => return Err(closed(error)),
        Err(error) => return Err(failed(Chain(&error).to_string())),
    }
    frames.into_parts().0.detach().map_err(|error| failed(error.to_string()))
}

fn is_loopback(stream: &DetachedStream) -> bool {
    match stream {
        DetachedStream::Unix(_) => true,
        DetachedStream::Tcp(stream) => stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()),
    }
}
