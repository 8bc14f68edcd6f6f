//! The hello and its answer, and the identity that all servers must share.

use std::time::{Duration, Instant};

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::protocol::message::{BodyCrc, Hello, ModeIs, Welcome};
use pushpull_common::protocol::refusal::short_hash;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Envelope, Header, Message, Refusal, limits, version};

use super::link::{LinkStatus, PendingRequest};
use super::{ServerSettings, Session};
use crate::config::Checksums;
use crate::error::Error;
use crate::gradients::parts::FrameBody;

impl Session {
    /// Sends the hello once the transport is connected.
    pub(super) fn connected(&mut self, now: Instant, index: usize, same_host: bool) {
        let seen_epoch = self.seen_epoch(index);
        let link = &mut self.links[index];
        if link.status != LinkStatus::Connecting {
            return;
        }
        link.status = LinkStatus::AwaitingWelcome;
        (link.same_host, link.requested_values, link.requested_push_buffer) =
            (same_host, false, false);
        link.crc = false;
        let hello = Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: self.config.role,
            job: Text::clipped(&*self.config.task.job),
            task: self.config.task.index,
            shard: link.shard,
            incarnation: self.config.incarnation,
            client_epoch: self.epoch,
            seen_epoch,
            seen_step: self.step,
            catalogue: self.plan.as_ref().map(|plan| plan.catalogue().digest()),
            body_crc: match self.config.checksums {
                Checksums::Remote => BodyCrc::Auto {},
                Checksums::Always => BodyCrc::On {},
                Checksums::Never => BodyCrc::Off {},
            },
            identity: self.config.identity.to_wire(),
            auth: List::default(),
        };
        self.send(now, index, PendingRequest::Hello, Envelope::default(), hello, FrameBody::Empty);
    }

    pub(super) fn hello_answered(
        &mut self,
        now: Instant,
        index: usize,
        header: &Header,
        message: Message,
    ) {
        match message {
            Message::Welcome(welcome) => self.welcome(now, index, header, &welcome),
            Message::Refused(refused) => self.hello_refused(now, index, refused.refusal),
            message => self.unexpected(now, index, &message),
        }
    }

    fn welcome(&mut self, now: Instant, index: usize, header: &Header, welcome: &Welcome) {
        let identity = Identity::from_wire(&welcome.identity);
        if let Some(error) = self.disagreement(index, &identity) {
            return self.fail(error);
        }
        if !self.welcome_epoch(now, index, welcome) {
            return;
        }
        if self.links[index].shard == self.config.owner {
            self.step = self.step.max(header.step);
            self.synchronous = matches!(welcome.mode, ModeIs::Synchronous { .. });
            self.owner_first = welcome.mode == (ModeIs::Asynchronous { owner_first: true });
        }
        if self.config.role.is_member() {
            self.epoch = self.epoch.max(welcome.client_epoch);
        }
        let link = &mut self.links[index];
        link.crc = welcome.body_crc == BodyCrc::On {};
        link.identity = identity;
        link.lease = Duration::from_millis(welcome.lease_ms.max(100).into());
        let (shards_per_task, non_finite) = (welcome.shards, welcome.non_finite);
        let mut encodings = self
            .server_settings
            .take()
            .map_or_else(Default::default, |settings| settings.encodings);
        encodings.insert(link.shard, welcome.encodings);
        let synchronous = self.synchronous;
        self.server_settings =
            Some(ServerSettings { shards_per_task, non_finite, synchronous, encodings });
        self.links[index].status = LinkStatus::Up;
        self.welcomed_at(index);
        self.drive(now);
    }

    /// Returns the first difference between a server's identity and that of another shard in use.
    fn disagreement(&self, index: usize, identity: &Identity) -> Option<Error> {
        let others = self.links.iter().enumerate().filter(|&(other, _)| other != index);
        others.into_iter().find_map(|(_, other)| {
            let (field, left_value, right_value) = other.identity.difference(identity)?;
            Some(Error::Identity {
                left: other.shard,
                right: self.links[index].shard,
                field: field.to_owned(),
                left_value: left_value.to_owned(),
                right_value: right_value.to_owned(),
                left_hash: short_hash(&other.identity.hash()),
                right_hash: short_hash(&identity.hash()),
            })
        })
    }

    fn hello_refused(&mut self, now: Instant, index: usize, refusal: Refusal) {
        match refusal {
            // Temporary refusals: retry until the operations reach their deadlines.
            Refusal::Stopping {} | Refusal::Busy { .. } => {
                self.reset_link(now, index, refusal.to_string());
            }
            refusal if self.hello_epoch_refused(now, index, &refusal) => {}
            refusal => {
                let error = self.refused("connect", index, refusal);
                self.fail(error);
            }
        }
    }
}

// A hello can carry every valid job name.
const _: () = assert!(ClusterSpec::JOB_NAME_BYTES_MAX == limits::JOB_BYTES_MAX);
