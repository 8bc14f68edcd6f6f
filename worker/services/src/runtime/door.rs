//! Admits the peers that have said hello to a function server.

use std::io;
use std::sync::Arc;

use pushpull_common::access::AccessEvent;
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

    fn access(&self, event: AccessEvent) {
        self.0.access().report(&event);
    }
}

/// Returns the refusal of a peer that is no client of functions: a rank of a ring, a task that looks
/// for a rendezvous, or a peer of a parameter server, if its cluster lists this server as a ps task.
fn role_refusal(role: Role, task: &TaskId, kind: u16) -> Option<Refusal> {
    match role {
        Role::Client {} => None,
        Role::Rank {} | Role::Task {} => Some(Refusal::Role { role: role.code(), kind }),
        _ => {
            let detail = format!("{task} serves functions only, and holds no variables");
            Some(Refusal::Unsupported { kind, detail: Detail::clipped(&detail) })
        }
    }
}

/// Serves a peer, or refuses it.
async fn admit(core: Arc<ServerCore>, peer: ArrivedPeer) {
    let ArrivedPeer { stream, reader, header, hello, origin, proven, .. } = peer;
    // Otherwise attaching fails only if the peer has closed the socket already.
    let stream = match Stream::attach(stream) {
        Ok(stream) => stream,
        Err(error) => return core.descriptors().check(&error),
    };
    let refusal = hello.agree(Features::ALL).err();
    let refusal = refusal.or_else(|| role_refusal(hello.role, core.task(), header.kind));
    // Another revision of the unreleased protocol.
    let protocol = || Identity::new().with_protocol();
    let refusal = refusal.or_else(|| protocol().refusal(&Identity::from_wire(&hello.identity)));
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
    core.serve(stream, reader, header, hello, body_crc, proven).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_told_what_the_server_is() {
        let refusal = |role| role_refusal(role, &TaskId::worker(3), 1);
        let text = refusal(Role::Worker {}).map(|refusal| refusal.to_string());
        let expected = "/job:worker/task:3 serves functions only, and holds no variables";
        assert!(text.as_ref().is_some_and(|text| text.ends_with(expected)), "{text:?}");
        assert_eq!(refusal(Role::Client {}), None);
    }

    #[test]
    fn a_rank_of_a_ring_is_refused_by_its_role() {
        let refusal = role_refusal(Role::Rank {}, &TaskId::worker(3), 1);
        assert_eq!(refusal, Some(Refusal::Role { role: 7, kind: 1 }));
    }
}
