//! The accepting thread: it hands each peer that has said hello to the shard that the hello names.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pushpull_common::access::AccessEvent;
use pushpull_common::protocol::message::Role;
use pushpull_net::auth::Credentials;
use pushpull_net::{
    AcceptLimits, ArrivedPeer, Endpoints, NoHello, PeerReceiver, ServicePeers,
    accept as accept_peers,
};
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;
use tokio_util::sync::CancellationToken;

use super::descriptor_watch::DescriptorWatch;
use super::handle::ServerEnd;
use super::shard_thread::Members;
use crate::event::{Event, EventSink};
use crate::metrics::Counters;

/// The configuration and channels of the accepting thread.
pub(super) struct Acceptor {
    pub(super) endpoints: Endpoints,
    pub(super) shards: Vec<mpsc::Sender<ArrivedPeer>>,
    pub(super) members: Vec<watch::Receiver<Members>>,
    pub(super) limits: AcceptLimits,
    /// Takes the clients of functions.
    pub(super) services: Option<Arc<dyn ServicePeers>>,
    pub(super) credentials: Option<Credentials>,
    pub(super) events: EventSink,
    /// Counts connections that belong to no shard.
    pub(super) counters: Arc<Counters>,
    pub(super) descriptor_watch: DescriptorWatch,
    pub(super) exit_when_done: Option<Duration>,
    pub(super) ending: Arc<ServerEnd>,
    pub(super) stop: CancellationToken,
}

/// Accepts connections on the calling thread until the server stops.
pub(super) fn run(acceptor: Acceptor) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    let stop = acceptor.stop.clone();
    local.block_on(&runtime, async move {
        let Acceptor { shards, services, counters, events, descriptor_watch, .. } = acceptor;
        let credentials = acceptor.credentials;
        let receiver = ShardPeers { shards, services, counters, events, descriptor_watch };
        accept_peers(acceptor.endpoints, acceptor.limits, credentials, receiver);
        let members = acceptor.members.clone();
        let all_left = async {
            match acceptor.exit_when_done {
                Some(grace) => all_members_left(members, grace).await,
                None => std::future::pending().await,
            }
        };
        let ending = &acceptor.ending;
        let finished = async {
            ending.finish.cancelled().await;
            let grace = ending.grace.get().copied().unwrap_or_default();
            // The time limit bounds the wait for workers that do not leave.
            let _ = tokio::time::timeout(grace, nobody_is_present(acceptor.members)).await;
            ending.is_final.store(true, Ordering::Relaxed);
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = all_left => stop.cancel(),
            () = finished => stop.cancel(),
        }
    });
    Ok(())
}

/// Returns once a member has joined and none has been present for `grace`.
async fn all_members_left(mut members: Vec<watch::Receiver<Members>>, grace: Duration) {
    loop {
        let now: Vec<Members> = members.iter_mut().map(|m| *m.borrow_and_update()).collect();
        let joined = now.iter().any(|&(joined, _)| joined > 0);
        let all_left = joined && now.iter().all(|&(_, present)| present == 0);
        let changed = any_changed(&mut members);
        match all_left {
            false => changed.await,
            true => match tokio::time::timeout(grace, changed).await {
                Ok(()) => {}
                Err(_) => return,
            },
        }
    }
}

/// Returns once no member is present.
async fn nobody_is_present(mut members: Vec<watch::Receiver<Members>>) {
    while members.iter_mut().any(|member| member.borrow_and_update().1 > 0) {
        any_changed(&mut members).await;
    }
}

/// Returns when any of the receivers has a new value.
async fn any_changed(members: &mut [watch::Receiver<Members>]) {
    let mut waits: Vec<_> = members.iter_mut().map(|member| Box::pin(member.changed())).collect();
    std::future::poll_fn(|context| {
        let ready = waits.iter_mut().any(|wait| wait.as_mut().poll(context).is_ready());
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Hands peers to the shards that they name, and the clients of functions to whom serves these.
struct ShardPeers {
    shards: Vec<mpsc::Sender<ArrivedPeer>>,
    services: Option<Arc<dyn ServicePeers>>,
    counters: Arc<Counters>,
    events: EventSink,
    descriptor_watch: DescriptorWatch,
}

impl PeerReceiver for ShardPeers {
    async fn take(&self, peer: ArrivedPeer) {
        if let (Some(services), Role::Client {}) = (&self.services, peer.hello.role) {
            return services.take(peer);
        }
        let shard = usize::from(peer.hello.shard.shard);
        if let Some(shard) = self.shards.get(shard).or(self.shards.first()) {
            // If the shard has ended, the server is stopping, and the peer sees a closed socket.
            let _ = shard.send(peer).await;
        }
    }

    fn no_hello(&self, reason: NoHello) {
        match reason {
            NoHello::TimedOut => self.counters.waiting_timed_out.add(1),
            NoHello::Evicted => self.counters.waiting_evicted.add(1),
            NoHello::Faulted => self.counters.waiting_faulted.add(1),
            NoHello::Denied => self.counters.peers_denied.add(1),
        }
    }

    fn access(&self, event: AccessEvent) {
        self.events.emit(&Event::Access(event));
    }

    fn out_of_descriptors(&self, error: &io::Error) {
        self.descriptor_watch.check(error);
    }
}
