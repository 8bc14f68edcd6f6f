//! A request of a peer: checks its rights, and hands it to the owner of what it asks for.

use std::time::{Duration, Instant};

use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Encoding;
use pushpull_common::protocol::message::{Operation, Role};
use pushpull_common::protocol::{Envelope, Header, Message, Refusal, message};

use super::client_registry::ClientPresence;
use super::parked_requests::{ParkedRequest, WaitReason};
use super::{ConnectionState, ExpectedBody, Peers};
use crate::client_key::ClientKey;
use crate::shard::calls::CoordinatorRequest;
use crate::shard::data::DataDeclaration;
use crate::shard::intake::encoded_parts::PartEncoding;
use crate::shard::output::ShardOutputs;
use crate::shard::pulls::{wait_for_values, wrong_encoding};
use crate::shard::tokens::ClientTokenRequest;
use crate::shard::{Detail, Shard};

/// A request of a peer, with everything that its answer needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerRequest {
    /// The connection. A request id has no meaning on another one.
    pub(crate) connection: u64,
    pub(crate) role: Role,
    /// The client, if the peer is one.
    pub(crate) client: Option<ClientKey>,
    /// The code of the message.
    pub(crate) kind: u16,
    /// The envelope of the answer.
    pub(crate) envelope: Envelope,
    /// When it arrived.
    pub(crate) since: Instant,
    /// When the peer stops waiting for the answer.
    pub(crate) deadline: Option<Instant>,
}

impl PeerRequest {
    /// Returns the request of a message that has just arrived.
    pub(in crate::shard) fn new(
        now: Instant,
        connection: u64,
        state: &ConnectionState,
        header: &Header,
    ) -> PeerRequest {
        let wait = Duration::from_millis(header.deadline_ms.into());
        PeerRequest {
            connection,
            role: state.role,
            client: state.client,
            kind: header.kind,
            envelope: answer_to(header),
            since: now,
            deadline: (header.deadline_ms > 0).then(|| now + wait),
        }
    }

    pub(in crate::shard) fn answer(&self, out: &mut ShardOutputs, message: Message) {
        out.answer(self.connection, self.envelope, message);
    }

    pub(in crate::shard) fn refuse(&self, out: &mut ShardOutputs, refusal: Refusal) {
        out.refuse(self.connection, self.envelope, refusal);
    }

    pub(in crate::shard) fn refuse_storage(&self, out: &mut ShardOutputs, error: &str) {
        out.refuse_storage(self.connection, self.envelope, error);
    }
}

/// The rights that a message needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MessageRights {
    /// The roles that may send it.
    senders: Senders,
    /// Whether it only reads. A shard that has failed to flush accepts nothing else.
    reads: bool,
    /// Whether it asks for something that only a present member may hold. A client that has left
    /// has no lease, so its tokens and push slots would never return.
    needs_lease: bool,
    /// Whether a chief sends it as the chief. Older chiefs are fenced.
    acts_as_chief: bool,
}

/// The roles that may send a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Senders {
    /// Every role of a shard's peers.
    All,
    /// Every role except a shard.
    Clients,
    /// Workers and chiefs.
    Members,
    /// The chief.
    Chief,
    /// Other shards.
    Shards,
    /// No role: the message is a server's.
    Nobody,
}

impl MessageRights {
    /// Returns the rights that this message needs.
    fn of(message: &Message) -> MessageRights {
        match message {
            Message::Heartbeat(_)
            | Message::Pull(_)
            | Message::PullEncoded(_)
            | Message::PullRows(_)
            | Message::PullRowsEncoded(_)
            | Message::FetchCatalogue(_) => Senders::All.rights().read_only(),
            Message::AwaitReady(_) => Senders::All.rights(),
            Message::ShareValues(_) => Senders::Clients.rights().read_only(),
            Message::AwaitEnd(_) => Senders::Clients.rights(),
            Message::TokenRequest(_)
            | Message::DeclareData(_)
            | Message::Reserve(_)
            | Message::SharePushBuffer(_) => Senders::Members.rights().with_lease(),
            Message::PushPart(part) => MessageRights::of_push(part.operation),
            Message::PushEncoded(encoded) => MessageRights::of_push(encoded.part.operation),
            Message::PushShared(shared) => MessageRights::of_push(shared.operation),
            Message::CallPart(of) => MessageRights::of_push(of.part.operation),
            Message::CallEncoded(of) => MessageRights::of_push(of.encoded.part.operation),
            Message::CallShared(of) => MessageRights::of_push(of.shared.operation),
            // Calls outlive the client that has opened them: they need no lease.
            Message::OpenCalls(_) | Message::CallsQuery(_) | Message::CloseCalls(_) => {
                Senders::Clients.rights()
            }
            // Querying the outcome of a push is not a read: the answer could report a push that is
            // not on disk.
            Message::ReturnToken(_)
            | Message::SkipBatch(_)
            | Message::Withdraw(_)
            | Message::OutcomeQuery(_) => Senders::Members.rights(),
            Message::Leave(_) => Senders::Members.rights().read_only(),
            Message::Declare(_)
            | Message::Initialize(_)
            | Message::FindCheckpoint(_)
            | Message::PassedOverQuery(_)
            | Message::PrepareRestore(_)
            | Message::Restore(_)
            | Message::Save(_)
            | Message::Finish(_) => Senders::Chief.rights().as_chief(),
            Message::SaveShard(_)
            | Message::Held(_)
            | Message::StepApplied(_)
            | Message::Recalled(_)
            | Message::PushesAudited(_) => Senders::Shards.rights(),
            _ => Senders::Nobody.rights(),
        }
    }

    /// Returns the rights that a part of a push needs. The chief assigns the first values.
    fn of_push(operation: Operation) -> MessageRights {
        let acts_as_chief = operation == Operation::Assign {};
        MessageRights { acts_as_chief, ..Senders::Members.rights().with_lease() }
    }

    /// Returns the refusal of a message that needs the lease of a client that has left.
    fn lease_refusal(self, peers: &Peers, request: &PeerRequest) -> Option<Refusal> {
        let client = request.client.filter(|_| self.needs_lease)?;
        if peers.registry.client(client).presence == ClientPresence::Present {
            return None;
        }
        let detail = Detail::clipped("this client has left; it may connect again");
        Some(Refusal::Unsupported { kind: request.kind, detail })
    }

    /// Returns the refusal of a message that its sender may not send.
    fn role_refusal(self, peers: &Peers, request: &PeerRequest) -> Option<Refusal> {
        let &PeerRequest { connection, role, kind, .. } = request;
        if !self.allow(role) {
            return Some(Refusal::Role { role: role.code(), kind });
        }
        peers.chief_refusal(connection).filter(|_| self.acts_as_chief)
    }

    /// Returns whether a peer with this role may send the message.
    fn allow(self, role: Role) -> bool {
        // Named functions are not called on a shard, which admits neither this role nor an admin.
        if matches!(role, Role::Client {} | Role::Admin {}) {
            return false;
        }
        match self.senders {
            Senders::All => true,
            Senders::Clients => role != Role::Peer {},
            Senders::Members => role.is_member(),
            Senders::Chief => role == Role::Chief {},
            Senders::Shards => role == Role::Peer {},
            Senders::Nobody => false,
        }
    }

    fn read_only(self) -> MessageRights {
        MessageRights { reads: true, ..self }
    }

    fn with_lease(self) -> MessageRights {
        MessageRights { needs_lease: true, ..self }
    }

    fn as_chief(self) -> MessageRights {
        MessageRights { acts_as_chief: true, ..self }
    }
}

impl Senders {
    fn rights(self) -> MessageRights {
        let (reads, needs_lease, acts_as_chief) = (false, false, false);
        MessageRights { senders: self, reads, needs_lease, acts_as_chief }
    }
}

impl Shard {
    /// Checks the rights of a message, and hands it to its owner.
    pub(in crate::shard) fn message(
        &mut self,
        now: Instant,
        connection: u64,
        header: &Header,
        message: Message,
    ) {
        let Shard { variables, files, peers, out, .. } = self;
        let Some(request) = peers.begin_request(out, now, connection, header) else { return };
        let rights = MessageRights::of(&message);
        let refusal = rights
            .lease_refusal(peers, &request)
            .or_else(|| files.poisoned().filter(|_| !rights.reads))
            .or_else(|| rights.role_refusal(peers, &request))
            .or_else(|| variables.epoch_refusal(header.restore_epoch));
        match refusal {
            Some(refusal) => request.refuse(out, refusal),
            None => self.dispatch(request, header, message),
        }
    }

    /// Hands a message to the owner of what it asks for.
    fn dispatch(&mut self, request: PeerRequest, header: &Header, message: Message) {
        let PeerRequest { connection, envelope, since: now, .. } = request;
        let Shard { variables, files, peers, intake, applier, steps, checkpoints, out, .. } = self;
        match (message, request.client) {
            (Message::Heartbeat(_), _) => match applier.growth_refusal() {
                None => request.answer(out, message::HeartbeatAnswer {}.into()),
                Some(refusal) => request.refuse(out, refusal),
            },
            (Message::ShareValues(asked), _) => {
                let shared = peers
                    .check_share_request(&request, asked.wants)
                    .and_then(|()| variables.share(&files.budget, steps, &request));
                peers.send_shared(out, &request, shared);
            }
            (Message::Declare(declare), _) => {
                let (digest, bytes) = (declare.digest, vec![0; header.body_bytes as usize]);
                let catalogue = ExpectedBody::Catalogue { request, digest, bytes };
                self.receive(&request, header, catalogue);
            }
            (Message::Initialize(asked), _) => {
                variables.initialize(applier, peers, out, request, asked.epoch);
            }
            (Message::FindCheckpoint(_), _) => checkpoints.find_checkpoint(steps, out, &request),
            (Message::PassedOverQuery(_), _) => checkpoints.answer_passed_over(out, &request),
            (Message::PrepareRestore(prepare), _) => self.prepare_restore(request, prepare),
            (Message::Restore(restore), _) => self.restore(request, restore.into()),
            (Message::Save(_), _) => {
                let bytes = vec![0; header.body_bytes as usize];
                self.receive(&request, header, ExpectedBody::User { request, bytes });
            }
            (Message::SaveShard(save), _) => {
                let name = save.name.as_str();
                checkpoints.save_shard(variables, peers, steps, out, &request, name);
            }
            (Message::AwaitReady(_), _) => peers.await_ready(variables, out, request),
            (Message::FetchCatalogue(_), _) => variables.send_catalogue(out, &request),
            (Message::Pull(pull), _) => {
                let wait = wait_for_values(variables, header, &pull.selection, None);
                self.pull(request, wait);
            }
            (Message::PullEncoded(asked), _) => {
                let form = ValueEncoding::from_code(asked.encoding)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let selection = &asked.pull.selection;
                let wait =
                    form.and_then(|form| wait_for_values(variables, header, selection, Some(form)));
                self.pull(request, wait);
            }
            (Message::PullRows(pull), _) => {
                let wait = self.pulls.wait_for_rows(variables, header, pull.partition, None);
                self.receive_row_numbers(request, header, wait);
            }
            (Message::PullRowsEncoded(asked), _) => {
                let codec = Encoding::from_code(asked.encoding)
                    .and_then(Encoding::codec_of_values)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let partition = asked.pull.partition;
                let wait = codec.and_then(|codec| {
                    self.pulls.wait_for_rows(variables, header, partition, Some(codec))
                });
                self.receive_row_numbers(request, header, wait);
            }
            (Message::TokenRequest(token), Some(_)) => {
                if checkpoints.restoring.is_some() {
                    return request.refuse(out, Refusal::NotInitialized {});
                }
                let entry = ParkedRequest { request, wait: WaitReason::Token };
                let token = ClientTokenRequest { entry, newest: token.newest };
                token.answer(steps, intake, peers, out, now);
            }
            (Message::ReturnToken(token), Some(client)) => {
                steps.return_token(intake, out, connection, client, envelope, &token);
            }
            (Message::SkipBatch(skipped), Some(client)) => {
                steps.skip_batch(intake, out, &request, client, &skipped);
            }
            (Message::DeclareData(declared), Some(client)) => {
                let declaration = DataDeclaration { request, client, declared };
                declaration.answer(steps, variables, peers, out, now);
            }
            (Message::Reserve(_), Some(client)) => intake.reserve(peers, out, request, client),
            (Message::PushPart(part), Some(client)) => {
                self.part(header, request, client, (part, None), None);
            }
            (Message::PushEncoded(encoded), Some(client)) => {
                let form = PartEncoding::of(&encoded);
                self.part(header, request, client, (encoded.part, None), Some(form));
            }
            (Message::CallPart(message::CallPart { part, call }), Some(client)) => {
                self.part(header, request, client, (part, Some(call)), None);
            }
            (Message::CallEncoded(message::CallEncoded { encoded, call }), Some(client)) => {
                let form = PartEncoding::of(&encoded);
                self.part(header, request, client, (encoded.part, Some(call)), Some(form));
            }
            (Message::SharePushBuffer(_), Some(client)) => {
                let shared = peers.check_shareable(&request).and_then(|()| {
                    intake.share_push_buffer(files, variables, steps, &request, client)
                });
                peers.send_shared(out, &request, shared);
            }
            (Message::PushShared(shared), Some(client)) => {
                self.push_shared(request, client, &shared, None);
            }
            (Message::CallShared(message::CallShared { shared, call }), Some(client)) => {
                self.push_shared(request, client, &shared, Some(call));
            }
            (Message::OpenCalls(open), _) => {
                CoordinatorRequest::Open(open).answer(steps, variables, peers, out, &request);
            }
            (Message::CallsQuery(query), _) => {
                let name = query.name.as_str().to_owned();
                let query = CoordinatorRequest::Query { name };
                query.answer(steps, variables, peers, out, &request);
            }
            (Message::CloseCalls(close), _) => {
                CoordinatorRequest::Close(close).answer(steps, variables, peers, out, &request);
            }
            (Message::Withdraw(_), Some(client)) => intake.withdraw(peers, out, &request, client),
            (Message::OutcomeQuery(_), Some(client)) => {
                intake.outcome_query(peers, out, &request, client);
            }
            (Message::Held(held), _) => steps.shard_holds(peers, out, now, connection, &held),
            (Message::StepApplied(applied), _) => {
                let (shard, step) = (applied.shard, header.step.0);
                steps.shard_has_applied(peers, out, now, connection, shard, step);
            }
            (Message::Recalled(answer), _) => {
                steps.recall_answered(intake, peers, out, now, connection, &answer);
            }
            (Message::PushesAudited(answer), _) => {
                self.push_audit_answered(now, connection, &answer);
            }
            (Message::Finish(_), _) => steps.finish(out, connection, envelope),
            (Message::AwaitEnd(_), _) => steps.await_end(peers, out, request),
            (Message::Leave(_), Some(client)) => {
                let entry = peers.registry.client_mut(client);
                let before = std::mem::replace(&mut entry.presence, ClientPresence::Left);
                if before == ClientPresence::Present {
                    self.report_left(client);
                }
                self.drop_client(now, client, false);
                request.answer(&mut self.out, message::Left {}.into());
            }
            (message, _) => {
                let detail =
                    Detail::clipped(format!("a server does not accept {}", message.name()));
                request.refuse(out, Refusal::Unsupported { kind: request.kind, detail });
            }
        }
    }

    /// Handles a pull that waits for this, or refuses it.
    fn pull(&mut self, request: PeerRequest, wait: Result<WaitReason, Refusal>) {
        let Shard { variables, files, peers, steps, pulls, out, .. } = self;
        match wait {
            Ok(wait) => {
                let entry = ParkedRequest { request, wait };
                pulls.serve(variables, files, peers, steps, out, entry);
            }
            Err(refusal) => request.refuse(out, refusal),
        }
    }

    /// Receives the row numbers of a pull, or refuses it.
    fn receive_row_numbers(
        &mut self,
        request: PeerRequest,
        header: &Header,
        wait: Result<WaitReason, Refusal>,
    ) {
        match wait {
            Ok(wait) => {
                let rows = ExpectedBody::Rows(ParkedRequest { request, wait });
                self.receive(&request, header, rows);
            }
            Err(refusal) => request.refuse(&mut self.out, refusal),
        }
    }
}

/// Returns the envelope of the answer to this request.
pub(in crate::shard) fn answer_to(header: &Header) -> Envelope {
    Envelope {
        request: header.request,
        restore_epoch: header.restore_epoch,
        step: header.step,
        sequence: header.sequence,
        deadline_ms: 0,
    }
}

#[cfg(test)]
mod tests;
