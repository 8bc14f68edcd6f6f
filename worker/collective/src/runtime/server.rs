//! [`RendezvousServer`]: a rendezvous with its connections.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use pushpull_common::ids::Incarnation;
use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Hello, RankAddresses};
use pushpull_net::FrameStream;
use tokio::sync::{Notify, mpsc};
use tokio::task::spawn_local;

use super::peer::{UNSENT_MAX, exchange};
use super::reach::connect_any;
use crate::rendezvous::{Rendezvous, RendezvousInput, RendezvousOutput};

/// A rendezvous with its connections, in tasks of one thread.
#[derive(Debug)]
pub(crate) struct RendezvousServer {
    rendezvous: RefCell<Rendezvous>,
    connections: RefCell<HashMap<u64, mpsc::Sender<Message>>>,
    next_connection: RefCell<u64>,
    /// Notified when the time of the next tick has changed.
    changed: Notify,
}

impl RendezvousServer {
    /// Serves a rendezvous on the current `LocalSet`.
    pub(crate) fn start(rendezvous: Rendezvous) -> Rc<RendezvousServer> {
        let server = Rc::new(RendezvousServer {
            rendezvous: RefCell::new(rendezvous),
            connections: RefCell::default(),
            next_connection: RefCell::new(1),
            changed: Notify::new(),
        });
        spawn_local(server.clone().run_timer());
        server
    }

    /// Returns whether members are connected.
    pub(crate) fn has_members(&self) -> bool {
        !self.connections.borrow().is_empty()
    }

    async fn run_timer(self: Rc<Self>) {
        loop {
            let wake_at = self.rendezvous.borrow().wake_at();
            match wake_at {
                Some(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at.into()) => self.handle(RendezvousInput::Tick),
                        () = self.changed.notified() => {}
                    }
                }
                None => self.changed.notified().await,
            }
        }
    }

    /// Serves a member until its connection ends, a message of it has a fault, or it may not be
    /// connected any more.
    pub(crate) async fn serve(
        self: Rc<Self>,
        frames: FrameStream,
        hello: Hello,
        message: Message,
        fault_of: impl Fn(&Message) -> Option<String>,
        revoked: impl Future<Output = ()>,
    ) {
        let connection = self.next_connection.replace_with(|next| *next + 1);
        let (sender, unsent) = mpsc::channel(UNSENT_MAX);
        self.connections.borrow_mut().insert(connection, sender);
        self.handle(RendezvousInput::Arrived { connection, hello: Box::new(hello) });
        self.handle(RendezvousInput::Message { connection, message });
        let mut fault = None;
        let arrived = |message| {
            // After a fault nothing else is handled, and without a sender the connection ends.
            if fault.is_none() {
                fault = fault_of(&message);
                match fault {
                    None => self.handle(RendezvousInput::Message { connection, message }),
                    Some(_) => _ = self.connections.borrow_mut().remove(&connection),
                }
            }
        };
        let ended = tokio::select! {
            reason = exchange(frames, None, unsent, arrived) => reason,
            () = revoked => "it may not connect any more".to_owned(),
        };
        let reason = fault.unwrap_or(ended);
        self.connections.borrow_mut().remove(&connection);
        self.handle(RendezvousInput::Closed { connection, reason });
    }

    /// Answers whether a process has ended.
    async fn probe(self: Rc<Self>, incarnation: Incarnation, addresses: RankAddresses) {
        let addresses: Vec<&str> = addresses.items().iter().map(|text| text.as_str()).collect();
        let gone = connect_any(&addresses, None).await.is_err_and(|unreached| unreached.gone);
        self.handle(RendezvousInput::Probed { incarnation, gone });
    }

    fn handle(self: &Rc<Self>, input: RendezvousInput) {
        let mut rendezvous = self.rendezvous.borrow_mut();
        rendezvous.handle(Instant::now(), input);
        while let Some(output) = rendezvous.poll_output() {
            let mut connections = self.connections.borrow_mut();
            match output {
                RendezvousOutput::Send { connection, message } => {
                    let sender = connections.get(&connection);
                    if sender.is_some_and(|sender| sender.try_send(message).is_err()) {
                        // Its connection ends, and the rendezvous is told so.
                        connections.remove(&connection);
                    }
                }
                RendezvousOutput::Close { connection } => _ = connections.remove(&connection),
                RendezvousOutput::Probe { incarnation, addresses } => {
                    _ = spawn_local(self.clone().probe(incarnation, addresses));
                }
            }
        }
        self.changed.notify_one();
    }
}
