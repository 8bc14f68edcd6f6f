//! What the session and the servers have agreed on: identity, client epoch, variables, restore
//! epochs, steps.
//!
//! Before it joins, a session follows every shard into a new restore epoch. After it has joined,
//! its tokens, its pending pushes and the values its caller computes with belong to one epoch. A
//! member that meets another epoch has been rolled back; a shard without one has lost its variables.
//! A reader keeps no such state and follows.
//!
//! Within one state of a shard, each epoch has a higher number than the one before. The epochs of
//! shards that live at the same time have one number only if one restore has begun them. A number
//! that is remembered says nothing if a state was lost since: the welcome of a shard names its
//! state, its **arena**, and a hello names the arena in which the session has joined.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::{FactDifference, Identity};
use pushpull_common::ids::{ClientEpoch, GlobalStep, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{
    BodyCrc, CatalogueState, FeatureOffer, Hello, ModeIs, Welcome,
};
use pushpull_common::protocol::refusal::short_hash;
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Header, Message, Refusal, limits, version};

use super::links::{LinkFault, PendingRequest, SessionLinks, ShardLink};
use super::{JoinedEpoch, ServerSettings, SessionConfig};
use crate::config::Checksums;
use crate::error::{Advice, Error};
use crate::gradients::sharding_plan::ShardingPlan;

/// The session's standing with the servers.
///
/// Invariant: once a member has joined, all shards it uses are in one restore epoch, or the session
/// has failed.
#[derive(Debug)]
pub(super) struct Membership {
    config: SessionConfig,
    /// The epoch of this client, which the step owner gives; 0 before its welcome.
    epoch: ClientEpoch,
    /// The variables, once the session has joined.
    plan: Option<Arc<ShardingPlan>>,
    settings: Option<ServerSettings>,
    /// The newest global step that the step owner has named.
    pub(super) step: GlobalStep,
    /// Whether the step owner's last welcome announced synchronous steps.
    pub(super) synchronous: bool,
}

impl Membership {
    pub(super) fn new(config: SessionConfig) -> Membership {
        Membership {
            config,
            epoch: ClientEpoch(0),
            plan: None,
            settings: None,
            step: GlobalStep(0),
            synchronous: false,
        }
    }

    pub(super) fn owner(&self) -> ShardId {
        self.config.owner
    }

    /// Returns whether the session may say hello to shards other than the step owner's.
    pub(super) fn has_epoch(&self) -> bool {
        self.epoch.0 != 0 || !self.is_member()
    }

    pub(super) fn is_member(&self) -> bool {
        self.config.role.is_member()
    }

    pub(super) fn settings(&self) -> Option<&ServerSettings> {
        self.settings.as_ref()
    }

    pub(super) fn plan(&self) -> Option<&Arc<ShardingPlan>> {
        self.plan.as_ref()
    }

    /// Joins with a plan.
    pub(super) fn join(&mut self, plan: Arc<ShardingPlan>) {
        self.plan = Some(plan);
    }

    /// Returns the one epoch of the shards of all these links, and the step owner's state; `None`
    /// until all are connected and in one epoch. The chief is about to restore a shard in an older
    /// epoch. The restore closes its connections, and the next welcome tells the new epoch.
    pub(super) fn epoch_to_join(
        &self,
        all: &[usize],
        links: &SessionLinks,
    ) -> Option<Result<JoinedEpoch, Error>> {
        if all.iter().any(|&link| !links[link].is_up()) {
            return None;
        }
        if let Some(&link) = all.iter().find(|&&link| !links[link].ready) {
            let refusal = Refusal::NotInitialized {};
            return Some(Err(refused("join", links[link].shard, refusal)));
        }
        if links.outdated(all.iter().copied()).next().is_some() {
            return None;
        }
        let epochs = all.iter().map(|&link| links[link].restore_epoch);
        let arena = links.owner().map_or(0, |owner| links[owner].arena);
        Some(Ok(JoinedEpoch { epoch: epochs.max().unwrap_or_default(), arena }))
    }

    /// Returns the hello for a shard.
    pub(super) fn hello(&self, link: &ShardLink) -> Hello {
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: self.config.role,
            job: Text::clipped(&*self.config.task.job),
            task: self.config.task.index,
            shard: link.shard,
            incarnation: self.config.incarnation,
            client_epoch: self.epoch,
            seen_epoch: self.seen_epoch(link),
            seen_step: self.step,
            seen_arena: if self.seen_epoch(link).0 == 0 { 0 } else { link.arena },
            catalogue: self.plan.as_ref().map(|plan| plan.catalogue().digest()),
            body_crc: match self.config.checksums {
                Checksums::Remote => BodyCrc::Auto {},
                Checksums::Always => BodyCrc::On {},
                Checksums::Never => BodyCrc::Off {},
            },
            identity: self.config.identity.to_wire(),
            auth: None,
            features: FeatureOffer::of(self.config.features),
        }
    }

    /// Records a welcome.
    pub(super) fn welcomed(
        &mut self,
        index: usize,
        header: &Header,
        welcome: &Welcome,
        links: &mut SessionLinks,
    ) -> Result<(), LinkFault> {
        let identity = Identity::from_wire(&welcome.identity);
        if let Some(error) = disagreement(links, index, &identity) {
            return Err(LinkFault::Session(error));
        }
        if links.is_owner(index) {
            let expected = self.config.expectations.check(links[index].shard, welcome);
            expected.map_err(LinkFault::Session)?;
        }
        self.welcome_epoch(&mut links[index], welcome)?;
        if links.is_owner(index) {
            self.step = self.step.max(header.step);
            self.synchronous = matches!(welcome.mode, ModeIs::Synchronous { .. });
            links.owner_first = welcome.mode == (ModeIs::Asynchronous { owner_first: true });
        }
        if self.is_member() {
            self.epoch = self.epoch.max(welcome.client_epoch);
        }
        let link = &mut links[index];
        link.crc = welcome.body_crc == BodyCrc::On {};
        link.identity = identity;
        link.lease = Duration::from_millis(welcome.lease_ms.max(100).into());
        link.values = self.config.values.filter(|&values| welcome.encodings.contains(values));
        let shards_per_task = welcome.shards;
        let non_finite = welcome.non_finite;
        let whole_variables = link.identity.field(Identity::WHOLE_VARIABLES) == Some(Identity::YES);
        let mut encodings =
            self.settings.take().map_or_else(Default::default, |settings| settings.encodings);
        encodings.insert(link.shard, welcome.encodings);
        let synchronous = self.synchronous;
        self.settings = Some(ServerSettings {
            shards_per_task,
            whole_variables,
            non_finite,
            synchronous,
            encodings,
        });
        Ok(())
    }

    /// Returns what a refused hello means for the link.
    pub(super) fn hello_refused(&self, link: &ShardLink, refusal: Refusal) -> LinkFault {
        match refusal {
            // The step owner assigned the epoch. The clocks of the two differ, and the shard has not
            // reached the step owner since it was started.
            Refusal::UnknownEpoch { .. } if link.shard != self.config.owner => {
                LinkFault::Reset(refusal.to_string())
            }
            // The hello named the epoch of this member. One of the same number is of another state.
            Refusal::RestoreEpoch { current, step, .. } if self.is_joined(link) => {
                LinkFault::Session(self.lost_epoch(link, current, step))
            }
            Refusal::RestoreEpoch { .. } => LinkFault::Reset(refusal.to_string()),
            // Retry until the operations reach their deadlines.
            refusal if Advice::of_refusal(&refusal) == Advice::Retry => {
                LinkFault::Reset(refusal.to_string())
            }
            refusal => LinkFault::Session(refused("connect", link.shard, refusal)),
        }
    }

    /// Records the epoch of an answer before its content is used. `begins_an_epoch` says whether the
    /// request names a new one.
    pub(super) fn check_epoch(
        &mut self,
        link: &mut ShardLink,
        pending: PendingRequest,
        header: &Header,
        message: &Message,
        begins_an_epoch: bool,
    ) -> Result<(), LinkFault> {
        if let Message::Refused(refused) = message
            && let Refusal::RestoreEpoch { current, step, .. } = refused.refusal
        {
            if let Some(error) = self.epoch_error(link, current, step) {
                return Err(LinkFault::Session(error));
            }
            // The first was refused for the epoch it names. The heartbeat was in flight when the
            // epoch began.
            let may_follow = match pending {
                PendingRequest::Request(_) => begins_an_epoch,
                PendingRequest::Heartbeat => current == link.restore_epoch,
                _ => false,
            };
            if may_follow {
                self.follow_epoch(link, current, header.step);
                return Ok(());
            }
            // The next welcome tells the epoch in which to repeat the pending requests.
            return Err(LinkFault::Reset(refused.refusal.to_string()));
        }
        if header.restore_epoch == link.restore_epoch {
            return Ok(());
        }
        if self.uses(link.shard) {
            // Pending pulls and pushes may be split between the epochs. The next welcome tells the
            // step at which the new epoch began.
            let error = format!("the shard has begun restore epoch {}", header.restore_epoch);
            return Err(LinkFault::Reset(error));
        }
        self.follow_epoch(link, header.restore_epoch, header.step);
        Ok(())
    }

    /// Returns whether this session has joined and needs the shard: for its variables or as the
    /// step owner.
    pub(super) fn uses(&self, shard: ShardId) -> bool {
        let plan = self.plan.as_ref();
        plan.is_some_and(|plan| plan.shards().contains(&shard) || shard == self.config.owner)
    }

    /// Returns the epoch that a hello demands of the shard; 0 for any.
    fn seen_epoch(&self, link: &ShardLink) -> RestoreEpoch {
        match self.is_member() && self.uses(link.shard) {
            true => link.restore_epoch,
            false => RestoreEpoch(0),
        }
    }

    /// Records a new epoch of a shard. The owner began it at this step.
    fn follow_epoch(&mut self, link: &mut ShardLink, epoch: RestoreEpoch, step: GlobalStep) {
        if link.restore_epoch != epoch {
            link.restore_epoch = epoch;
            if link.shard == self.config.owner {
                // The step falls if the previous epoch was ahead.
                self.step = step;
            }
        }
    }

    /// Returns whether this is a member that has joined and needs the shard of the link.
    fn is_joined(&self, link: &ShardLink) -> bool {
        self.is_member() && self.uses(link.shard)
    }

    /// Returns the error that ends a joined member when a shard it uses is in another epoch.
    fn epoch_error(
        &self,
        link: &ShardLink,
        current: RestoreEpoch,
        step: GlobalStep,
    ) -> Option<Error> {
        let differs = self.is_joined(link) && current != link.restore_epoch;
        differs.then(|| self.lost_epoch(link, current, step))
    }

    /// Returns the error of a member whose epoch on a shard is over. The next one may have a lower
    /// number: if all shards have lost their state, it is counted from the checkpoint.
    fn lost_epoch(&self, link: &ShardLink, current: RestoreEpoch, step: GlobalStep) -> Error {
        match current {
            RestoreEpoch(0) => Error::StateLost { shard: link.shard },
            _ => Error::RolledBack { from_step: self.step.0, to_step: step.0 },
        }
    }

    /// Records the epoch of a welcome.
    fn welcome_epoch(&mut self, link: &mut ShardLink, welcome: &Welcome) -> Result<(), LinkFault> {
        let shard = link.shard;
        let ready = matches!(welcome.catalogue, CatalogueState::Ready { .. });
        let uses = self.uses(shard);
        if uses && !ready && !self.is_member() {
            // The chief may still restore it. The next hello lets it compare the variables.
            return Err(LinkFault::Reset("its variables have no values".to_owned()));
        }
        let epoch = welcome.restore_epoch;
        let step = welcome.restored_step;
        let is_lost = link.has_lost(welcome.arena);
        if self.is_joined(link) && (epoch != link.restore_epoch || is_lost) {
            return Err(LinkFault::Session(self.lost_epoch(link, epoch, step)));
        }
        if uses && !ready {
            return Err(LinkFault::Session(Error::StateLost { shard }));
        }
        if is_lost {
            // Nothing is known of the epochs of this state.
            link.restore_epoch = RestoreEpoch(0);
        }
        link.arena = welcome.arena;
        self.follow_epoch(link, epoch, step);
        link.ready = ready;
        Ok(())
    }
}

/// Returns the error for a refusal of this operation by a shard.
pub(super) fn refused(doing: &'static str, shard: ShardId, refusal: Refusal) -> Error {
    match refusal {
        Refusal::Fenced { .. } => Error::Fenced,
        refusal => Error::Refused { doing, shard, refusal },
    }
}

/// Returns the first difference between a server's identity and that of another shard in use.
fn disagreement(links: &SessionLinks, index: usize, identity: &Identity) -> Option<Error> {
    let others = links.iter().enumerate().filter(|&(other, _)| other != index);
    others.into_iter().find_map(|(_, other)| {
        let difference = other.identity.difference(identity)?;
        let FactDifference { setting: field, ours: left_value, theirs: right_value } = difference;
        Some(Error::Identity {
            left: other.shard,
            right: links[index].shard,
            field,
            left_value,
            right_value,
            left_hash: short_hash(&other.identity.hash()),
            right_hash: short_hash(&identity.hash()),
        })
    })
}

// A hello can carry every valid job name.
const _: () = assert!(ClusterSpec::JOB_NAME_BYTES_MAX == limits::JOB_BYTES_MAX);
