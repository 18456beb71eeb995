"""What ``psengine doctor`` looks at: one module per subject, one function per check."""
