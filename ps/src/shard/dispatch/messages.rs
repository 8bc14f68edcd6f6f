//! Messages: checks the rights of their senders, and hands each to the owner of what it asks for.

use std::time::Instant;

use pushpull_common::access::Roles;
use pushpull_common::catalogue::ValueEncoding;
use pushpull_common::codec::Encoding;
use pushpull_common::protocol::message::{Operation, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Header, Message, Refusal, message};

use super::coordinators::CoordinatorRequest;
use super::data::DataDeclaration;
use super::tokens::ClientTokenRequest;
use crate::event::AdminOrder;
use crate::shard::Shard;
use crate::shard::changes::Changes;
use crate::shard::peers::{ExpectedBody, Peers};
use crate::shard::pulls::{wait_for_values, wrong_encoding};
use crate::shard::request::PeerRequest;
use crate::shard::request::encoded_part::PartEncoding;
use crate::shard::request::parked_request::{ParkedRequest, WaitReason};

/// The rights that a message needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MessageRights {
    /// The roles that may send it.
    senders: Roles,
    /// Whether it only reads. A shard that has failed to flush accepts nothing else.
    reads: bool,
    /// Whether it asks for something that only a present member may hold. A client that has left
    /// has no lease, so its tokens and push slots would never return.
    needs_lease: bool,
    /// Whether a chief sends it as the chief. Older chiefs are fenced.
    acts_as_chief: bool,
    /// Whether it is a coordinator's, who schedules calls. A reader that has proved who it is sends
    /// it only if it may also call functions.
    coordinates: bool,
}

/// The roles that a shard admits, except those who administer it.
const ALL: Roles = Roles::of(&[Role::Worker {}, Role::Chief {}, Role::Reader {}, Role::Peer {}]);
const CLIENTS: Roles = Roles::of(&[Role::Worker {}, Role::Chief {}, Role::Reader {}]);
const MEMBERS: Roles = Roles::of(&[Role::Worker {}, Role::Chief {}]);
const CHIEF: Roles = Roles::of(&[Role::Chief {}]);
const SHARDS: Roles = Roles::of(&[Role::Peer {}]);
const ADMINS: Roles = Roles::of(&[Role::Admin {}]);
/// The message is a server's, or of another conversation than a shard's.
const NOBODY: Roles = Roles::of(&[]);

impl MessageRights {
    /// Returns the rights that this message needs.
    fn of(message: &Message) -> MessageRights {
        match message {
            // Whoever is admitted has a lease to renew.
            Message::Heartbeat(_) => sent_by(ALL.and(ADMINS)).read_only(),
            Message::Pull(_)
            | Message::PullEncoded(_)
            | Message::PullRows(_)
            | Message::PullRowsEncoded(_)
            | Message::FetchCatalogue(_) => sent_by(ALL).read_only(),
            Message::AwaitReady(_) => sent_by(ALL),
            Message::ShareValues(_) => sent_by(CLIENTS).read_only(),
            Message::AwaitEnd(_) => sent_by(CLIENTS),
            Message::TokenRequest(_)
            | Message::DeclareData(_)
            | Message::Reserve(_)
            | Message::SharePushBuffer(_) => sent_by(MEMBERS).with_lease(),
            Message::PushPart(part) => MessageRights::of_push(part.operation),
            Message::PushEncoded(encoded) => MessageRights::of_push(encoded.part.operation),
            Message::PushShared(shared) => MessageRights::of_push(shared.operation),
            Message::EffectPart(of) => MessageRights::of_push(of.part.operation),
            Message::EffectEncoded(of) => MessageRights::of_push(of.encoded.part.operation),
            Message::EffectShared(of) => MessageRights::of_push(of.shared.operation),
            // A coordinator outlives the client that has opened it: it needs no lease.
            Message::OpenCoordinator(_)
            | Message::CoordinatorQuery(_)
            | Message::CloseCoordinator(_) => sent_by(CLIENTS).by_coordinator(),
            // Querying the outcome of a push is not a read: the answer could report a push that is
            // not on disk.
            Message::ReturnToken(_)
            | Message::SkipBatch(_)
            | Message::Withdraw(_)
            | Message::OutcomeQuery(_) => sent_by(MEMBERS),
            Message::Leave(_) => sent_by(MEMBERS).read_only(),
            Message::Declare(_)
            | Message::Initialize(_)
            | Message::FindCheckpoint(_)
            | Message::PassedOverQuery(_)
            | Message::PrepareRestore(_)
            | Message::Restore(_) => sent_by(CHIEF).as_chief(),
            Message::Save(_) | Message::Finish(_) => sent_by(CHIEF.and(ADMINS)).as_chief(),
            Message::StatusQuery(_) => sent_by(ADMINS).read_only(),
            // A shard that has failed to flush must stop all the more.
            Message::Stop(_) => sent_by(ADMINS).read_only(),
            Message::SaveShard(_)
            | Message::Held(_)
            | Message::StepApplied(_)
            | Message::Recalled(_)
            | Message::PushesAudited(_) => sent_by(SHARDS),
            // Answers of servers, and what functions and rings exchange.
            _ => sent_by(NOBODY),
        }
    }

    /// Returns the rights that a part of a push needs. The chief assigns the first values.
    fn of_push(operation: Operation) -> MessageRights {
        let acts_as_chief = operation == Operation::Assign {};
        MessageRights { acts_as_chief, ..sent_by(MEMBERS).with_lease() }
    }

    /// Returns the refusal of a message that needs the lease of a client that has left.
    fn lease_refusal(self, peers: &Peers, request: &PeerRequest) -> Option<Refusal> {
        let client = request.client.filter(|_| self.needs_lease)?;
        if peers.is_present(client) {
            return None;
        }
        let detail = Detail::clipped("this client has left; it may connect again");
        Some(Refusal::Unsupported { kind: request.kind, detail })
    }

    /// Returns the refusal of a message that its sender may not send.
    fn role_refusal(self, peers: &Peers, request: &PeerRequest) -> Option<Refusal> {
        let &PeerRequest { connection, role, kind, .. } = request;
        let is_idle_reader =
            self.coordinates && role == Role::Reader {} && !peers.may_call(connection);
        if is_idle_reader || !self.senders.contains(role) {
            return Some(Refusal::Role { role: role.code(), kind });
        }
        self.acts_as_chief.then(|| peers.chief_refusal(connection)).flatten()
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

    fn by_coordinator(self) -> MessageRights {
        MessageRights { coordinates: true, ..self }
    }
}

/// Returns the rights of a message that these roles may send.
fn sent_by(senders: Roles) -> MessageRights {
    MessageRights {
        senders,
        reads: false,
        needs_lease: false,
        acts_as_chief: false,
        coordinates: false,
    }
}

impl Shard {
    /// Checks the rights of a message, and hands it to its owner. Returns what that has changed.
    pub(in crate::shard) fn message(
        &mut self,
        now: Instant,
        connection: u64,
        header: &Header,
        message: Message,
    ) -> Changes {
        let Shard { variables, files, peers, out, .. } = self;
        let Some(request) = peers.begin_request(out, now, connection, header) else {
            return Changes::NONE;
        };
        let rights = MessageRights::of(&message);
        let refusal = rights
            .lease_refusal(peers, &request)
            .or_else(|| files.poisoned().filter(|_| !rights.reads))
            .or_else(|| rights.role_refusal(peers, &request))
            .or_else(|| variables.epoch_refusal(header.restore_epoch));
        match refusal {
            Some(refusal) => {
                request.refuse(out, refusal);
                Changes::NONE
            }
            None => self.hand_on(request, header, message),
        }
    }

    /// Hands a message to the owner of what it asks for. Returns what that has changed.
    fn hand_on(&mut self, request: PeerRequest, header: &Header, message: Message) -> Changes {
        let connection = request.connection;
        let now = request.since;
        match (message, request.client) {
            (Message::Heartbeat(_), _) => {
                match self.applier.growth_refusal() {
                    None => request.answer(&mut self.out, message::HeartbeatAnswer {}.into()),
                    Some(refusal) => request.refuse(&mut self.out, refusal),
                }
                return Changes::NONE;
            }
            (Message::ShareValues(asked), _) => self.share_values(&request, asked.wants),
            (Message::Declare(declare), _) => {
                let digest = declare.digest;
                let bytes = vec![0; header.body_bytes as usize];
                let catalogue = ExpectedBody::Catalogue { request, digest, bytes };
                return self.receive(&request, header, catalogue);
            }
            (Message::Initialize(asked), _) => self.initialize(request, asked.epoch),
            (Message::FindCheckpoint(_), _) => self.find_checkpoint(&request),
            (Message::PassedOverQuery(_), _) => {
                self.checkpoints.answer_passed_over(&mut self.out, &request);
            }
            (Message::PrepareRestore(prepare), _) => self.prepare_restore(request, prepare.into()),
            (Message::Restore(restore), _) => self.restore(request, restore.into()),
            (Message::Save(_), _) => {
                self.report_order(&request, AdminOrder::Save);
                let bytes = vec![0; header.body_bytes as usize];
                return self.receive(&request, header, ExpectedBody::User { request, bytes });
            }
            (Message::SaveShard(save), _) => self.save_shard(&request, save.name.as_str()),
            (Message::AwaitReady(_), _) => self.await_ready(request),
            (Message::FetchCatalogue(_), _) => {
                self.variables.send_catalogue(&mut self.out, &request);
                return Changes::NONE;
            }
            (Message::Pull(pull), _) => {
                let wait = wait_for_values(self.variables.ready(), header, &pull.selection, None);
                self.pull(request, wait);
                return Changes::NONE;
            }
            (Message::PullEncoded(asked), _) => {
                let form = ValueEncoding::from_code(asked.encoding)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let selection = &asked.pull.selection;
                let store = self.variables.ready();
                let wait =
                    form.and_then(|form| wait_for_values(store, header, selection, Some(form)));
                self.pull(request, wait);
                return Changes::NONE;
            }
            (Message::PullRows(pull), _) => {
                let store = self.variables.ready();
                let wait = self.pulls.wait_for_rows(store, header, pull.partition, None);
                return self.receive_row_numbers(request, header, wait);
            }
            (Message::PullRowsEncoded(asked), _) => {
                let codec = Encoding::from_code(asked.encoding)
                    .and_then(Encoding::codec_of_values)
                    .ok_or_else(|| wrong_encoding(header, asked.encoding));
                let store = self.variables.ready();
                let partition = asked.pull.partition;
                let wait = codec.and_then(|codec| {
                    self.pulls.wait_for_rows(store, header, partition, Some(codec))
                });
                return self.receive_row_numbers(request, header, wait);
            }
            (Message::TokenRequest(token), Some(_)) => {
                if self.checkpoints.restoring.is_some() {
                    request.refuse(&mut self.out, Refusal::NotInitialized {});
                    return Changes::NONE;
                }
                let entry = ParkedRequest { request, wait: WaitReason::Token };
                self.request_token(now, ClientTokenRequest { entry, newest: token.newest });
            }
            (Message::ReturnToken(token), Some(client)) => {
                self.return_token(&request, client, &token);
            }
            (Message::SkipBatch(skipped), Some(client)) => {
                self.skip_batch(&request, client, &skipped);
            }
            (Message::DeclareData(declared), Some(client)) => {
                self.declare_data(&DataDeclaration { request, client, declared });
            }
            (Message::Reserve(_), Some(client)) => self.reserve(request, client),
            (Message::PushPart(part), Some(client)) => {
                return self.part(header, request, client, part, None, None);
            }
            (Message::PushEncoded(encoded), Some(client)) => {
                let form = PartEncoding::of(&encoded);
                return self.part(header, request, client, encoded.part, None, Some(form));
            }
            (Message::EffectPart(message::EffectPart { part, effect }), Some(client)) => {
                return self.part(header, request, client, part, Some(effect), None);
            }
            (Message::EffectEncoded(message::EffectEncoded { encoded, effect }), Some(client)) => {
                let form = PartEncoding::of(&encoded);
                return self.part(header, request, client, encoded.part, Some(effect), Some(form));
            }
            (Message::SharePushBuffer(_), Some(client)) => {
                self.share_push_buffer(&request, client);
            }
            (Message::PushShared(shared), Some(client)) => {
                self.push_shared(request, client, &shared, None);
            }
            (Message::EffectShared(message::EffectShared { shared, effect }), Some(client)) => {
                self.push_shared(request, client, &shared, Some(effect));
            }
            (Message::OpenCoordinator(open), _) => {
                self.answer_coordinator(&request, CoordinatorRequest::Open(open));
            }
            (Message::CoordinatorQuery(query), _) => {
                let name = query.name.as_str().to_owned();
                self.answer_coordinator(&request, CoordinatorRequest::Query { name });
            }
            (Message::CloseCoordinator(close), _) => {
                self.answer_coordinator(&request, CoordinatorRequest::Close(close));
            }
            (Message::Withdraw(_), Some(client)) => self.withdraw(&request, client),
            (Message::OutcomeQuery(_), Some(client)) => self.answer_outcome(&request, client),
            (Message::Held(held), _) => self.shard_holds(now, connection, &held),
            (Message::StepApplied(applied), _) => {
                self.shard_has_applied(now, connection, applied.shard, header.step.0);
            }
            (Message::Recalled(answer), _) => self.recall_answered(now, connection, &answer),
            (Message::PushesAudited(answer), _) => {
                self.push_audit_answered(now, connection, &answer);
            }
            (Message::Finish(_), _) if self.steps.owner.is_none() => {
                let detail = Detail::clipped(format!("{} does not own the step", self.id));
                let refusal = Refusal::Unsupported { kind: request.kind, detail };
                request.refuse(&mut self.out, refusal);
            }
            (Message::Finish(_), _) => {
                self.finish();
                self.report_order(&request, AdminOrder::Finish);
                request.answer(&mut self.out, message::Finished {}.into());
            }
            (Message::AwaitEnd(_), _) => self.await_end(request),
            (Message::StatusQuery(asked), _) => {
                self.answer_status(&request, asked.members_from);
                return Changes::NONE;
            }
            (Message::Stop(_), _) => self.stop(&request),
            (Message::Leave(_), Some(client)) => {
                self.client_leaves(now, client);
                request.answer(&mut self.out, message::Left {}.into());
            }
            (message, _) => {
                let detail =
                    Detail::clipped(format!("a server does not accept {}", message.name()));
                let refusal = Refusal::Unsupported { kind: request.kind, detail };
                request.refuse(&mut self.out, refusal);
            }
        }
        Changes::ALL
    }
}

#[cfg(test)]
mod tests;
