//! The rights that a message needs: which roles may send it, and when a shard accepts it.

use pushpull_common::protocol::Message;
use pushpull_common::protocol::message::{Operation, Role};

/// The rights that a message needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::shard) struct MessageRights {
    /// The roles that may send it.
    senders: Senders,
    /// Whether it only reads. A shard that has failed to flush accepts nothing else.
    pub(in crate::shard) reads: bool,
    /// Whether it asks for something that only a present member may hold. A client that has left
    /// has no lease, so its tokens and push slots would never return.
    pub(in crate::shard) needs_lease: bool,
    /// Whether a chief sends it as the chief. Older chiefs are fenced.
    pub(in crate::shard) acts_as_chief: bool,
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
    pub(in crate::shard) fn of(message: &Message) -> MessageRights {
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
            | Message::Restore(_)
            | Message::Save(_)
            | Message::Finish(_) => Senders::Chief.rights().as_chief(),
            Message::SaveShard(_)
            | Message::Held(_)
            | Message::StepApplied(_)
            | Message::Recalled(_) => Senders::Shards.rights(),
            _ => Senders::Nobody.rights(),
        }
    }

    /// Returns the rights that a part of a push needs. The chief assigns the first values.
    fn of_push(operation: Operation) -> MessageRights {
        let acts_as_chief = operation == Operation::Assign {};
        MessageRights { acts_as_chief, ..Senders::Members.rights().with_lease() }
    }

    /// Returns whether a peer with this role may send the message.
    pub(in crate::shard) fn allow(self, role: Role) -> bool {
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

#[cfg(test)]
mod tests {
    use pushpull_common::ids::{RestoreEpoch, ShardId, TokenId};
    use pushpull_common::protocol::message::{
        self, PushPart, PushShared, Reserved, Selection, SharedRange,
    };
    use pushpull_common::protocol::wire::List;

    use super::*;

    const ROLES: [Role; 6] = [
        Role::Worker {},
        Role::Chief {},
        Role::Reader {},
        Role::Peer {},
        Role::Admin {},
        Role::Client {},
    ];

    /// The roles that may send a message, each as a letter (F calls functions), and then the other
    /// rights.
    fn rights(message: impl Into<Message>) -> String {
        let rights = MessageRights::of(&message.into());
        let roles = ROLES.iter().zip("WCRPAF".chars()).filter(|(role, _)| rights.allow(**role));
        let mut text: String = roles.map(|(_, letter)| letter).collect();
        let others = [
            (rights.reads, " reads"),
            (rights.needs_lease, " lease"),
            (rights.acts_as_chief, " chief"),
        ];
        text.extend(others.into_iter().filter(|(has, _)| *has).map(|(_, name)| name));
        text
    }

    fn part(operation: Operation) -> PushPart {
        let (token, whole, read) = (TokenId(1), None, None);
        PushPart {
            operation,
            token,
            generation: 1,
            push_slot: 1,
            offset: 0,
            whole,
            next: false,
            read,
        }
    }

    fn shared(operation: Operation) -> PushShared {
        let PushPart { token, generation, push_slot, whole, next, read, .. } = part(operation);
        let ranges = List::of(std::iter::empty::<SharedRange>()).unwrap();
        PushShared { operation, token, generation, push_slot, whole, next, read, ranges }
    }

    #[test]
    fn everybody_reads() {
        assert_eq!(rights(message::Heartbeat {}), "WCRP reads");
        assert_eq!(rights(message::Pull { selection: Selection::All {} }), "WCRP reads");
        assert_eq!(rights(message::FetchCatalogue {}), "WCRP reads");
        assert_eq!(rights(message::AwaitReady {}), "WCRP");
        assert_eq!(rights(message::ShareValues { wants: 1 }), "WCR reads");
    }

    #[test]
    fn members_train_under_a_lease() {
        assert_eq!(rights(message::TokenRequest { newest: TokenId(0) }), "WC lease");
        assert_eq!(rights(message::Reserve {}), "WC lease");
        assert_eq!(rights(message::SharePushBuffer {}), "WC lease");
        for operation in [Operation::Gradient {}, Operation::AssignAdd {}] {
            assert_eq!(rights(part(operation)), "WC lease");
            assert_eq!(rights(shared(operation)), "WC lease");
        }
        assert_eq!(rights(message::ReturnToken { token: TokenId(1), generation: 1 }), "WC");
        assert_eq!(rights(message::Withdraw {}), "WC");
        assert_eq!(rights(message::OutcomeQuery {}), "WC");
        assert_eq!(rights(message::Leave {}), "WC reads");
    }

    #[test]
    fn a_chief_declares_and_assigns_first_values_as_the_chief() {
        assert_eq!(rights(part(Operation::Assign {})), "WC lease chief");
        assert_eq!(rights(shared(Operation::Assign {})), "WC lease chief");
        assert_eq!(rights(message::Declare { digest: [0; 32] }), "C chief");
        assert_eq!(rights(message::Initialize { epoch: RestoreEpoch(1) }), "C chief");
        assert_eq!(rights(message::FindCheckpoint {}), "C chief");
        assert_eq!(rights(message::PassedOverQuery {}), "C chief");
        assert_eq!(rights(message::Save {}), "C chief");
        assert_eq!(rights(message::Finish {}), "C chief");
    }

    #[test]
    fn shards_report_steps_and_nobody_answers_for_a_server() {
        let shard = ShardId { task: 0, shard: 1 };
        assert_eq!(rights(message::StepApplied { shard }), "P");
        assert_eq!(rights(message::Recalled { token: TokenId(1), shard, applied: true }), "P");
        assert_eq!(rights(message::HeartbeatAnswer {}), "");
        assert_eq!(rights(Reserved { push_slot: 1 }), "");
    }
}
