//! The handshake: checks a peer's hello, and admits or refuses the peer.

use pushpull_common::codec::Encodings;
use pushpull_common::error::Chain;
use pushpull_common::identity::{FactDifference, Identity};
use pushpull_common::ids::{ClientEpoch, RestoreEpoch, TaskId};
use pushpull_common::protocol::limits::PART_BYTES_MAX;
use pushpull_common::protocol::message::{BodyCrc, Hello, ModeIs, NonFinitePolicy, Role, Welcome};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Header, Refusal};

use crate::config::{Mode, NonFinite};
use crate::event::Event;
use crate::shard::Shard;
use crate::shard::output::ShardOutput;
use crate::shard::peers::ConnectionState;
use crate::shard::peers::client_registry::AdmittedClient;
use crate::shard::request::answer_to;
use crate::shard::request::incoming_hello::IncomingHello;

impl Shard {
    pub(in crate::shard) fn connected(&mut self, hello: IncomingHello<'_>, header: &Header) {
        match self.admit(hello) {
            Ok(welcome) => self.out.answer(hello.connection, answer_to(header), welcome.into()),
            Err(refusal) => {
                self.out.refuse(hello.connection, answer_to(header), refusal);
                self.out.close(hello.connection);
            }
        }
    }

    fn admit(&mut self, incoming: IncomingHello<'_>) -> Result<Welcome, Refusal> {
        let IncomingHello { connection, hello, origin, principal, now } = incoming;
        let version = self.check_peer(&incoming)?;
        if hello.role == (Role::Peer {}) {
            self.report_differences(hello);
        }
        self.check_variables(hello)?;
        self.make_room(hello.role)?;
        let (client, client_epoch) = match hello.role {
            Role::Worker {} | Role::Chief {} => {
                let admitted = self.admit_client(incoming)?;
                (Some(admitted.key), admitted.epoch)
            }
            Role::Reader {} | Role::Admin {} => (None, hello.client_epoch),
            Role::Peer {} => (None, self.owner_time(incoming)),
            Role::Client {} => {
                let detail = Detail::clipped("this server offers no functions");
                return Err(Refusal::Unsupported { kind: 1, detail });
            }
            role => {
                return Err(Refusal::Role { role: role.code(), kind: 1 });
            }
        };
        let role = hello.role;
        let peer_task = (role == Role::Peer {}).then_some(hello.task);
        let crc = incoming.has_crc();
        let features = self.config.features.agreed(hello.features.has);
        let heard_at = now;
        let expected_body = None;
        let refused = None;
        let state = ConnectionState {
            role,
            client,
            principal: principal.cloned(),
            task: TaskId::new(hello.job.as_str(), hello.task),
            peer_task,
            origin,
            heard_at,
            shared: 0,
            crc,
            features,
            expected_body,
            refused,
        };
        self.peers.connections.insert(connection, state);
        Ok(self.welcome(&incoming, version, client_epoch))
    }

    /// Checks the protocol version, which it returns, and that the peer and this server agree.
    fn check_peer(&self, incoming: &IncomingHello<'_>) -> Result<u16, Refusal> {
        let hello = incoming.hello;
        let version = hello.agree(self.config.features)?;
        if hello.shard != self.id {
            let task = self.id.task;
            let shards = self.config.shards;
            return Err(Refusal::WrongShard { wanted: hello.shard, task, shards });
        }
        if let Some(refusal) = self.identity.refusal(&Identity::from_wire(&hello.identity)) {
            return Err(refusal);
        }
        incoming.check_task(&self.config)?;
        Ok(version)
    }

    /// Checks that the peer knows the variables that this shard has.
    fn check_variables(&self, hello: &Hello) -> Result<(), Refusal> {
        if let (Some(client), Some(store)) = (hello.catalogue, self.variables.store())
            && client != store.catalogue().digest()
        {
            let server = store.catalogue().digest();
            let differs =
                Detail::clipped("the variables were declared again since this client joined");
            return Err(Refusal::Catalogue { server, client, differs });
        }
        if self.checkpoints.restoring.is_some() && hello.seen_epoch != RestoreEpoch(0) {
            // The client reconnects in the next epoch, and then learns how far it was rolled back.
            let what = Detail::clipped("restores under way");
            return Err(Refusal::Busy { what, limit: 1 });
        }
        Ok(())
    }

    /// Returns the answer to a peer that is admitted.
    fn welcome(
        &self,
        hello: &IncomingHello<'_>,
        version: u16,
        client_epoch: ClientEpoch,
    ) -> Welcome {
        let Shard { config, identity, files, variables, .. } = self;
        Welcome {
            version,
            shards: config.shards,
            client_epoch,
            mode: match &config.mode {
                Mode::Asynchronous(mode) => {
                    ModeIs::Asynchronous { owner_first: mode.reject_older.is_some() }
                }
                Mode::Synchronous(mode) => ModeIs::Synchronous {
                    replicas_to_aggregate: mode.replicas_to_aggregate,
                    total_num_replicas: mode.total_num_replicas,
                },
            },
            lease_ms: u32::try_from(config.lease.as_millis()).unwrap_or(u32::MAX),
            part_bytes_max: PART_BYTES_MAX as u32,
            body_crc: if hello.has_crc() { BodyCrc::On {} } else { BodyCrc::Off {} },
            non_finite: match config.non_finite {
                NonFinite::Reject => NonFinitePolicy::Reject {},
                NonFinite::Count => NonFinitePolicy::Count {},
                NonFinite::Allow => NonFinitePolicy::Allow {},
            },
            encodings: Encodings::all(),
            catalogue: variables.catalogue_state(),
            restore_epoch: variables.epoch,
            restored_step: variables.restored_step,
            arena: files.arena.stamp.arena,
            unix_address: Text::clipped(&config.unix_address),
            identity: identity.to_wire(),
            features: config.features,
        }
    }

    /// Reports the settings of another ps task that differ and may, each value once.
    fn report_differences(&mut self, hello: &Hello) {
        let theirs = Identity::from_wire(&hello.identity);
        let Shard { id, identity, peers, out, .. } = self;
        for difference in identity.free_differences(&theirs) {
            let FactDifference { setting, ours: here, theirs: there } = difference;
            let reported = peers.differing.entry((hello.task, setting.clone())).or_default();
            if *reported != there {
                there.clone_into(reported);
                let task = TaskId::new(hello.job.as_str(), hello.task);
                let event = Event::SettingsDiffer { shard: *id, task, setting, here, there };
                out.push(ShardOutput::Event(event));
            }
        }
    }

    /// Ensures that a peer may have a connection. A member takes the place of a reader, and so does an
    /// administrator.
    fn make_room(&mut self, role: Role) -> Result<(), Refusal> {
        let limit = self.config.network.connections_max;
        if self.peers.connections.len() < limit {
            return Ok(());
        }
        let displaces = role.is_member() || matches!(role, Role::Peer {} | Role::Admin {});
        let Some(reader) = self.peers.most_silent_reader().filter(|_| displaces) else {
            let what = Detail::clipped("connections");
            return Err(Refusal::Busy { what, limit: limit as u64 });
        };
        self.counters.readers_displaced.add(1);
        self.disconnected(reader);
        self.out.close(reader);
        Ok(())
    }

    /// Returns the time of a step owner's epochs for another shard, whose hello names the newest
    /// epoch that it has recorded; 0 on other shards.
    ///
    /// An owner that has lost its state, and has a slow clock, would assign epochs that the other
    /// shards have fenced. An owner with values has recorded what it has assigned.
    fn owner_time(&mut self, incoming: IncomingHello<'_>) -> ClientEpoch {
        if self.steps.owner.is_none() {
            return ClientEpoch(0);
        }
        let IncomingHello { hello, now, .. } = incoming;
        if !self.variables.is_ready()
            && self.peers.registry.mint_above_recorded(hello.client_epoch, now)
        {
            self.close_peers();
        }
        self.peers.registry.owner_time(now)
    }

    /// Closes the connections of other shards, which connect again. Only a welcome tells them the
    /// time of the step owner, and with an earlier one they would refuse the epochs that it assigns.
    fn close_peers(&mut self) {
        let connections = self.peers.connections.iter();
        let of_peers = connections.filter(|(_, state)| state.role == Role::Peer {});
        let mut of_peers: Vec<u64> = of_peers.map(|(&connection, _)| connection).collect();
        of_peers.sort_unstable();
        for connection in of_peers {
            self.disconnected(connection);
            self.out.close(connection);
        }
    }

    /// Admits a client, and drops what an older incarnation or connection of it has.
    fn admit_client(&mut self, incoming: IncomingHello<'_>) -> Result<AdmittedClient, Refusal> {
        let IncomingHello { connection, hello, now, .. } = incoming;
        // The client's values are of another restore epoch, or this shard has lost the state that
        // the client knew. A state that was lost, and all states of its time, may have counted the
        // same epochs, so the number alone does not tell.
        let seen = hello.seen_epoch;
        let is_lost = seen != RestoreEpoch(0) && hello.seen_arena != self.files.arena.stamp.arena;
        let lost = is_lost.then(|| self.variables.other_epoch(seen));
        if let Some(refusal) = lost.or_else(|| self.variables.epoch_refusal(seen)) {
            return Err(refusal);
        }
        let owns_step = self.steps.owner.is_some();
        // Only a hello that may join ends an older run of its task.
        self.peers.check_role(owns_step, &incoming)?;
        self.end_replaced(now, hello)?;
        let clients = self.peers.registry.counts().0;
        self.files.reserve_client(clients).map_err(|error| Refusal::Storage {
            detail: Detail::clipped(Chain(&error).to_string()),
        })?;
        // An audit asks what its client has pushed.
        let tokens = self.steps.asynchronous_tokens();
        let audited = tokens.into_iter().flat_map(|tokens| tokens.audits.clients());
        let audited = audited.map(|(client, _)| client);
        let admitted = self.peers.admit(owns_step, &incoming, audited)?;
        if let Some(replaced) = admitted.replaced.filter(|&old| old != connection) {
            self.out.close(replaced);
            self.drop_client_connection(replaced, admitted.key);
        }
        if admitted.fenced {
            if let Some(inbox) = &mut self.intake.inbox {
                inbox.orphan_whole(admitted.key);
            }
            self.drop_client(now, admitted.key, true);
        }
        if let Some(tokens) = self.steps.asynchronous_tokens_mut() {
            tokens.audits.came_back(admitted.key);
        }
        let Shard { peers, steps, checkpoints, out, .. } = self;
        if hello.role == (Role::Chief {}) && peers.chief.raise(admitted.key, admitted.epoch) {
            let connections = &peers.connections;
            // One that has ended has no requests.
            checkpoints.chief_replaced(out, |connection| {
                connections.get(&connection).is_none_or(|of| of.role == Role::Chief {})
            });
            steps.shards.announce_chief(out, peers.chief.epoch);
        }
        steps.replica_joins(now, admitted.key, peers.registry.client(admitted.key).task.index);
        if admitted.joins {
            self.report_joined(&admitted);
        }
        Ok(admitted)
    }
}
