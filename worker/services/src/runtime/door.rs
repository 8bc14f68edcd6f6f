//! Admits the peers that have said hello to a function server.

use std::io;
use std::sync::Arc;

use pushpull_common::identity::Identity;
use pushpull_common::ids::TaskId;
use pushpull_common::peer_origin::PeerOrigin;
use pushpull_common::protocol::message::{BodyCrc, Refused, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{BodyStamp, Envelope, Features, Refusal, encode};
use pushpull_net::{ArrivedPeer, FrameStream, PeerReceiver, ServicePeers, Stream};

use super::server_core::ServerCore;

/// Admits the clients of a server.
#[derive(Debug)]
pub(crate) struct Door(pub(crate) Arc<ServerCore>);

impl ServicePeers for Door {
    fn take(&self, peer: ArrivedPeer) {
        let core = self.0.clone();
        self.0.spawn(async move { admit(core, peer).await });
    }
}

impl PeerReceiver for Door {
    async fn take(&self, peer: ArrivedPeer) {
        ServicePeers::take(self, peer);
    }

    fn out_of_descriptors(&self, error: &io::Error) {
        self.0.descriptors().check(error);
    }
}

/// Returns the refusal of a peer that is no client of functions. A worker is one, if its cluster
/// lists this server as a ps task.
fn functions_only(task: &TaskId, kind: u16) -> Refusal {
    let detail = format!("{task} serves functions only, and holds no variables");
    Refusal::Unsupported { kind, detail: Detail::clipped(&detail) }
}

/// Serves a peer, or refuses it.
async fn admit(core: Arc<ServerCore>, peer: ArrivedPeer) {
    let ArrivedPeer { stream, reader, header, hello, origin } = peer;
    // Otherwise attaching fails only if the peer has closed the socket already.
    let stream = match Stream::attach(stream) {
        Ok(stream) => stream,
        Err(error) => return core.descriptors().check(&error),
    };
    let refusal = match hello.agree(Features::ALL) {
        Err(refusal) => Some(refusal),
        Ok(_) if hello.role != (Role::Client {}) => Some(functions_only(core.task(), header.kind)),
        // Another revision of the unreleased protocol.
        Ok(_) => Identity::new().with_protocol().refusal(&Identity::from_wire(&hello.identity)),
    };
    if let Some(refusal) = refusal {
        let envelope = Envelope { request: header.request, ..Envelope::default() };
        let mut frame = Vec::new();
        encode(&mut frame, &envelope, &Refused { refusal }.into(), BodyStamp::NONE);
        // The peer may have closed the connection.
        let _ = FrameStream::new(stream, reader).send(&frame).await;
        return;
    }
    let body_crc = match hello.body_crc {
        BodyCrc::Auto {} if origin == PeerOrigin::Remote => BodyCrc::On {},
        BodyCrc::Auto {} => BodyCrc::Off {},
        chosen => chosen,
    };
    core.serve(stream, reader, header, hello, body_crc).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_told_what_the_server_is() {
        let text = functions_only(&TaskId::worker(3), 1).to_string();
        let expected = "/job:worker/task:3 serves functions only, and holds no variables";
        assert!(text.ends_with(expected), "{text}");
    }
}
